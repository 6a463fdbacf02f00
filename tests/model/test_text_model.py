"""A loaded model answering requests: what the worker serves, without the process around it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from engine.errors import ContextFullError, ModelFileError, PreemptedError, UsageError
from engine.model.text_model import TextModel
from engine.protocol.events import (
    Chat,
    Embedded,
    EngineOptions,
    Finished,
    Generate,
    Grammar,
    Message,
    Prefilling,
    RawText,
    Sampling,
    Thinking,
    Token,
    TokenIds,
)
from engine.runtime import grammar
from engine.runtime.sampling import Sampler
from engine.targets.cpu.runner import CPURunner
from tests import generated_model
from tests.reference import Reference
from tests.reference_functions import log_softmax
from tests.thorough import rarely

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf", architecture="qwen3")


@pytest.fixture(scope="module")
def model(path):
    return TextModel(EngineOptions(model_path=str(path), context_length=128), lambda _: None)


def answer(model, prompt, cancelled=lambda: False, **request):
    events = []
    if isinstance(prompt, str):
        prompt = RawText(text=prompt)
    request = {"sampling": GREEDY, "max_tokens": 12, "ignore_eos": True} | request
    end = model.generate(Generate(request_id=7, prompt=prompt, **request), events.append, cancelled)
    return end, [e for e in events if isinstance(e, Token)], [e for e in events if isinstance(e, Prefilling)]


def test_a_cpu_runs_one_step_before_the_first_prompt(path, monkeypatch):
    steps, run = [], CPURunner.run
    monkeypatch.setattr(CPURunner, "run", lambda self, slots: steps.append(slots) or run(self, slots))
    TextModel(EngineOptions(model_path=str(path), context_length=128), lambda _: None)
    assert len(steps) == 1, "all kernels are compiled by then"


def test_greedy_tokens_and_logprobs_are_the_references(model, path):
    prompt = list(range(20, 60))
    end, tokens, _ = answer(model, TokenIds(ids=tuple(prompt)), logprobs=5)
    reference = Reference(path)
    for token in tokens:
        wanted = log_softmax(reference.logits(prompt)[-1])
        order = np.argsort(-wanted)[:5]
        assert token.id == order[0] == token.top[0].id
        assert token.logprob == pytest.approx(wanted[token.id], abs=2e-3)
        assert [t.logprob for t in token.top] == pytest.approx(wanted[order].tolist(), abs=2e-3)
        prompt.append(token.id)
    assert (end.reason, end.prompt_n, end.predicted_n) == ("length", 40, 12)


def test_the_common_prefix_is_not_computed_again(model):
    first, said, _ = answer(model, TokenIds(ids=tuple(range(50))))
    more = (*range(50), *(t.id for t in said), 5, 6)
    again, tokens, progress = answer(model, TokenIds(ids=more))
    assert again.cached_n == 50 + first.predicted_n - 1  # all but the last, which was never run
    assert progress[0].cached == again.cached_n
    fresh, _, _ = answer(model, TokenIds(ids=(9, *more[1:])))  # another start: nothing to reuse
    assert fresh.cached_n == 0
    restarted, repeated, _ = answer(model, TokenIds(ids=more))
    assert restarted.cached_n == len(more) - 1  # what came between has not taken its room
    assert [t.id for t in repeated] == [t.id for t in tokens]


def test_a_grammar(model):
    """`test_grammar` has more."""
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}
    grammar = Grammar(kind="json_schema", source=json.dumps(schema))
    for sampling in (GREEDY, Sampling(seed=3, temperature=1.5)):
        end, tokens, _ = answer(model, "x", sampling=sampling, max_tokens=90, grammar=grammar)
        assert end.reason == "stop" and set(json.loads("".join(t.text for t in tokens))) <= {"a", "b"}


def test_a_seed_gives_the_same_text(model):
    hot = Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=11)
    texts = [[t.id for t in answer(model, "once", sampling=hot)[1]] for _ in range(2)]
    assert texts[0] == texts[1]
    other = Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=12)
    assert [t.id for t in answer(model, "once", sampling=other)[1]] != texts[0]
    drawn = answer(model, "once", sampling=Sampling(temperature=1.0))[0].seed
    assert drawn != answer(model, "once", sampling=Sampling(temperature=1.0))[0].seed


def test_cancelling_ends_between_tokens_and_during_prefill(model):
    calls = iter(range(100))
    end, tokens, _ = answer(model, "abc", cancelled=lambda: next(calls) >= 4)
    assert (end.reason, end.predicted_n) == ("cancelled", len(tokens))
    end, tokens, _ = answer(model, TokenIds(ids=tuple(range(3, 90))), cancelled=lambda: True)
    assert (end.reason, end.predicted_n, tokens) == ("cancelled", 0, [])
    end, tokens, _ = answer(model, "abc")
    assert (end.reason, len(tokens)) == ("length", 12)


def test_the_context_is_filled_to_its_last_token_and_not_beyond(model):
    ids = tuple(i % 200 for i in range(120))
    end, tokens, _ = answer(model, TokenIds(ids=ids), max_tokens=None)
    assert (end.reason, len(tokens)) == ("length", 9)  # the last one need not be stored
    with pytest.raises(ContextFullError, match=r"129 tokens .* holds 128") as caught:
        answer(model, TokenIds(ids=(*ids, *range(9))))
    assert ("--context" in caught.value.hint) == (model.ready.model.trained_context > 128)


def test_a_context_as_long_as_the_model_was_trained_for_is_not_to_be_longer(model, monkeypatch):
    trained = replace(model.ready, model=replace(model.ready.model, trained_context=128))
    monkeypatch.setattr(model, "ready", trained)
    with pytest.raises(ContextFullError) as caught:
        answer(model, TokenIds(ids=tuple(i % 200 for i in range(129))))
    assert "--context" not in caught.value.hint and "longer context" in caught.value.hint


def test_prompts_that_cannot_be_answered(model):
    for prompt in (TokenIds(ids=()), TokenIds(ids=(10**6,)), TokenIds(ids=(-1,)), RawText(text="")):
        with pytest.raises(UsageError):
            answer(model, prompt)


def test_weights_that_are_no_numbers_are_named_and_spoil_no_other_answer(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", architecture="qwen3", tied=False)
    generated_model.damage(path, "token_embd.weight", row=7)
    model = TextModel(EngineOptions(model_path=str(path), context_length=128), lambda _: None)
    whole = [TokenIds(ids=(6,) * n) for n in (5, 40)]
    wanted = [[t.id for t in answer(model, prompt)[1]] for prompt in whole]
    for sampling in (GREEDY, Sampling(temperature=0.8)):
        with pytest.raises(ModelFileError, match="damaged: the output of the embedding is not finite"):
            answer(model, TokenIds(ids=(3, 7)), sampling=sampling)
    with pytest.raises(ModelFileError, match="damaged: the output of the embedding is not finite"):
        answer(model, TokenIds(ids=(3, 7)), pooling="mean")
    for n in range(5):  # which leave what is no number in all blocks, unnoticed
        calls = iter(range(3))
        answer(model, TokenIds(ids=(n, *[7] * 110)), cancelled=lambda calls=calls: next(calls) > 0)
    assert [[t.id for t in answer(model, prompt)[1]] for prompt in whole] == wanted
    generated_model.damage(path, "blk.1.ffn_down.weight", row=3)
    model = TextModel(EngineOptions(model_path=str(path), context_length=128), lambda _: None)
    with pytest.raises(ModelFileError, match=r"of layer 1 \(ffn_gate, ffn_up, ffn_down\) is not finite"):
        answer(model, whole[0])


def test_a_chat_ends_its_turn_and_thinking_is_told_apart(model, monkeypatch):
    chat = Chat(messages=(Message(role="user", content="hello"),))
    tokenizer = model.tokenizer
    script = (
        tokenizer.encode("<think>", special=True)
        + tokenizer.encode("hm")
        + tokenizer.encode("</think>", special=True)
        + tokenizer.encode("yes")
        + sorted(tokenizer.eos_ids)[:1]
    )
    monkeypatch.setattr(model.scheduler, "_runner", Scripted(model._runner, script))
    end, tokens, _ = answer(model, chat, ignore_eos=False, max_tokens=None)
    assert (end.reason, end.predicted_n) == ("stop", len(script))
    assert "".join(t.text for t in tokens if isinstance(t, Thinking)) == "hm"
    assert "".join(t.text for t in tokens if not isinstance(t, Thinking)) == "yes"


def test_an_effort_reaches_the_template(tmp_path):
    template = "{{ messages[0].content }}{{ reasoning_effort | default('') }}"
    path = generated_model.write(tmp_path / "m.gguf", architecture="qwen3", template=template)
    model = TextModel(EngineOptions(model_path=str(path), context_length=128), lambda _: None)
    chat = Chat(messages=(Message(role="user", content="hello"),))
    plain, high = (
        answer(model, chat, sampling=Sampling(temperature=0, effort=effort), max_tokens=1)[0].prompt_n
        for effort in (None, "high")
    )
    assert model.ready.model.takes_effort and high == plain + len(model.tokenizer.encode("high"))


class Wrapped:
    """A runner, but for what is defined here."""

    def __init__(self, runner):
        self._runner = runner

    def __getattr__(self, name):
        return getattr(self._runner, name)


class Scripted(Wrapped):
    """Returns the tokens of a script."""

    def __init__(self, runner, script):
        super().__init__(runner)
        self._script = iter(script)

    def run(self, slots, ahead=None):
        self._runner.run(slots)
        return np.array([next(self._script) for slot in slots if slot.want == "last"])


class DrawingRunner(Wrapped):
    """Draws with the numbers it was given, and records each `ahead`."""

    def __init__(self, runner):
        super().__init__(runner)
        self.asked, self.sampler = [], SimpleNamespace(prepare=self._draw)

    def _draw(self, sequence, drawing):
        self._left, self._said, self._sampling = (
            iter(drawing.uniforms),
            list(drawing.tokens),
            drawing.sampling,
        )
        return self._sampling.top_k != 0 and not drawing.top

    def run(self, slots, ahead=None):
        slot, chosen = slots[-1], self._runner.run(slots)
        if not slot.draw:
            return chosen
        assert slot.inputs == (self._said[slot.position],)
        self.asked.append(bool(ahead) and ahead() is not None)
        ids, masses = Sampler(self._sampling).candidates(self._runner.logits()[0], self._said)
        place = np.searchsorted(np.cumsum(masses), next(self._left) * masses.sum(), "right")
        self._said.append(int(ids[place]))
        return np.array(self._said[-1:])


def test_sampling_on_the_device_gives_the_text_of_sampling_on_the_host(model, monkeypatch):
    hot = Sampling(temperature=1.5, top_k=50, repeat_penalty=1.2, seed=11)
    wanted = [t.id for t in answer(model, "once", sampling=hot)[1]]
    runner = DrawingRunner(model._runner)
    monkeypatch.setattr(model.scheduler, "_runner", runner)
    monkeypatch.setattr(model.scheduler.blocks, "has_room", lambda tokens: True)
    assert [t.id for t in answer(model, "once", sampling=hot)[1]] == wanted
    assert runner.asked == [True] * 11 + [False]  # none runs ahead of the last
    assert [t.id for t in answer(model, "once", sampling=hot, logprobs=2)[1]] == wanted
    for other in (GREEDY, Sampling(top_k=0, seed=1)):
        answer(model, "once", sampling=other)
    assert len(runner.asked) == 12  # these were the host's business


def test_what_the_engine_does_not_run_is_refused(tmp_path, path):
    with pytest.raises(UsageError, match="context of 4,096"):
        TextModel(EngineOptions(model_path=str(path), context_length=4096), lambda _: None)


def test_finished_counts(model):
    end, _, _ = answer(model, "abc", max_tokens=1)
    assert isinstance(end, Finished)
    assert end.predicted_ms == 0 and end.prompt_ms > 0 and end.context_used == end.prompt_n


def test_what_is_captured_later_gives_way_to_a_prompt(model, monkeypatch):
    asked = iter([False, False, True, False])
    uses = []
    monkeypatch.setattr(model._capture, "_left", (uses.append(i) for i in range(9)))
    model.warm_up(lambda: next(asked))
    assert uses == [0, 1]
    answer(model, "once", sampling=GREEDY)
    model.warm_up(lambda: False)
    assert uses == [*range(9)]


def test_a_server_reads_its_vocabulary_for_grammars_while_nobody_asks(model, monkeypatch):
    read, vocabulary = [], grammar._vocabulary
    monkeypatch.setattr(grammar, "_vocabulary", lambda *args: read.append(args) or vocabulary(*args))
    monkeypatch.setattr(model._answers, "_grammars", grammar.Grammars(model.tokenizer))
    model.warm_up(lambda: False)  # of a chat
    monkeypatch.setattr(model._runner, "parallel", 2)
    model.warm_up(lambda: True)
    assert not read
    model.warm_up(lambda: False)
    for kind, source in (("json_schema", "{}"), ("reply", 'start: "a"')):
        model._answers.begin(
            Generate(request_id=1, prompt=RawText(text="a"), grammar=Grammar(kind=kind, source=source)), print
        )
    assert len(read) == 1


def test_kernels_that_are_compiled_later_give_way_to_a_prompt(model, monkeypatch):
    tries = []

    def prepare():
        tries.append(len(tries))
        if len(tries) == 1:
            raise PreemptedError("a prompt came")

    monkeypatch.setattr(model._capture, "_left", model._capture._prepare(prepare))
    asked = iter([False, True])
    model.warm_up(lambda: next(asked))
    assert tries == [0]
    model.warm_up(lambda: False)
    assert tries == [0, 1]


def test_what_is_captured_takes_no_room_from_a_conversation(model, monkeypatch):
    answer(model, "once", sampling=GREEDY)
    kept, run, steps = model.scheduler.blocks.counts(), model._runner.run, []
    monkeypatch.setattr(model._runner, "run", lambda slots: steps.append(slots) or run(slots))
    model._capture.again()
    model._capture.steps()
    assert steps and model.scheduler.blocks.counts() == kept
    monkeypatch.setattr(model.scheduler.blocks, "has_free", lambda lengths: False)
    steps.clear()
    model._capture._run(1, 0)
    assert not steps


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize(("kernels", "quant"), [("auto", "Q8_0"), rarely("graph", "F32")])
def test_embeddings_are_the_references(kernels, quant, tmp_path):
    """Also of a prompt in several pieces, and of one of which most is known."""
    # with kernels of `test_graph_runner.py` and of the model above
    path = generated_model.write(tmp_path / "m.gguf", architecture="qwen3", quant=quant, classes=3, layers=1)
    model = TextModel(
        EngineOptions(model_path=str(path), context_length=128, kernels=kernels), lambda _: None
    )
    reference = Reference(path)
    norm, classes = (reference._tensors[f"{name}.weight"] for name in ("output_norm", "cls.output"))
    for tokens in np.random.default_rng(2).integers(0, 200, (2, 100)), [[5]]:
        for text in [*tokens, *tokens]:
            ids = [*map(int, text)]
            stream = reference.streams(ids)[-1]
            hidden = stream / np.sqrt((stream * stream).mean(-1, keepdims=True) + 1e-6) * norm
            powers = np.exp(classes @ hidden[-1])
            wanted = {"mean": hidden.mean(0), "last": hidden[-1], "rank": powers / powers.sum()}
            for pooling, vector in wanted.items():
                events = []
                request = Generate(request_id=1, prompt=TokenIds(ids=tuple(ids)), pooling=pooling)
                model.generate(request, events.append, lambda: False)
                [values] = [np.frombuffer(e.values, "<f4") for e in events if isinstance(e, Embedded)]
                error = np.linalg.norm(values - vector) / np.linalg.norm(vector)
                assert error < (2e-5 if quant == "F32" else 1e-2), (pooling, error)
