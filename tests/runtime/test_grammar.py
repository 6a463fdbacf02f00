"""Answers that keep to a grammar, by a model whose words are noise."""

import json
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from engine.errors import UsageError
from engine.formats.thinking import THINK, ThinkSplitter
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tools.calls import ToolCallParser
from engine.formats.tools.forms import GEMMA, shown_form
from engine.formats.tools.grammars import reply_grammar
from engine.protocol.events import Chat, Generate, Grammar, Message, RawText, Sampling, Thinking, Token
from engine.runtime import grammar
from engine.runtime.grammar import Grammars
from engine.system import own_thread
from tests import generated_model
from tests.formats.vocabularies import CONTROL, byte_level
from tests.reference_model import ReferenceModel

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [7, 77]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = Grammar(kind="json_schema", source=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf", architecture="qwen3")
    return ReferenceModel(path, 256)


def answer(model, prompt, **request):
    events = []
    request = {"sampling": Sampling(temperature=1.5, seed=5), "max_tokens": 100} | request
    end = model.generate(Generate(request_id=1, prompt=prompt, **request), events.append, lambda: False)
    return "".join(e.text for e in events if type(e) is Token), end, events


@pytest.mark.parametrize(
    ("prompt", "temperature"),
    [(RawText(text="Once"), 0), (Chat(messages=(Message(role="user", content="Who?"),), think=False), 1.5)],
    ids=["greedy", "chat"],
)
def test_an_answer_fits_its_schema(model, prompt, temperature):
    sampling = Sampling(temperature=temperature, seed=5)
    text, end, events = answer(model, prompt, grammar=PERSON, sampling=sampling, logprobs=3, ignore_eos=True)
    person = json.loads(text)
    assert end.reason == "stop" and person.keys() == {"name", "age"} and person["age"] in (7, 77)
    tokens = [e for e in events if isinstance(e, Token)]
    # Log-probabilities are those of the model, before the mask.
    assert any(token.top[0].id != token.id for token in tokens) and all(t.logprob > -99 for t in tokens)


def test_a_lark_grammar(model):
    text, *_ = answer(model, RawText(text="x"), grammar=Grammar(kind="lark", source='start: "yes" | "no"'))
    assert text in ("yes", "no")


def test_thinking_is_free_and_the_answer_is_not(model):
    """The reply opens thinking with the first token, which the grammar alone would not allow."""
    tokenizer = model.tokenizer
    opened, closed = (tokenizer.special_tokens[mark] for mark in ("<think>", "</think>"))
    splitter = ThinkSplitter(THINK)
    constraint = Grammars(tokenizer).constraint(PERSON, splitter, "<think>")
    logits = np.zeros(tokenizer.vocab_size + 3, np.float32)  # models pad their output
    brace = tokenizer.encode("{")[0]

    def allowed() -> set[int]:
        return set(np.flatnonzero(np.isfinite(constraint.masked(logits))).tolist())

    def take(token: int) -> None:
        assert token in allowed()
        constraint.accept(token)
        splitter.feed(tokenizer.piece(token).decode())

    assert {opened, brace} <= allowed() and closed not in allowed() and len(allowed()) < 30
    take(opened)
    assert allowed() == {*range(logits.size)} - tokenizer.eos_ids  # an answer is to follow
    take(tokenizer.encode("why")[0])
    take(closed)
    assert brace in allowed() and opened not in allowed() and len(allowed()) < 30
    take(brace)
    assert tokenizer.vocab_size not in allowed()


def test_a_chat_with_thinking_ends_in_its_grammar(model):
    prompt = Chat(
        messages=(Message(role="user", content="Who?"), Message(role="assistant", content="", thinking="Hm"))
    )
    text, _, events = answer(model, prompt, grammar=PERSON, max_tokens=60)
    assert all(
        isinstance(event, Thinking) for event in events if isinstance(event, Token)
    ) or text.startswith("{")


def test_digits_of_numbers_have_an_end(model):
    tokenizer = model.tokenizer

    def goes_on(grammar: Grammar, text: str) -> tuple[bool, bool]:
        """Whether a digit may follow `text`, and whether anything else may."""
        constraint = Grammars(tokenizer).constraint(grammar, None, "")
        for token in tokenizer.encode(text):
            constraint.accept(token)
        scores = constraint.masked(np.zeros(tokenizer.vocab_size, np.float32))
        pieces = [tokenizer.piece(int(id)) for id in np.flatnonzero(np.isfinite(scores))]
        digits = [piece[:1].isdigit() for piece in pieces]
        return any(digits), not all(digits)

    anything = Grammar(kind="json_schema", source="{}")
    assert goes_on(anything, '{"x": 0.' + 19 * "3") == (True, True)
    assert goes_on(anything, '{"x": 0.' + 20 * "3") == (False, True)
    assert goes_on(anything, '{"x": "' + 20 * "3") == (True, True)  # a text
    assert goes_on(Grammar(kind="json_schema", source='{"type": "number"}'), 20 * "3") == (False, True)
    long = Grammar(kind="lark", source='start: "[" /[0-9]{30}/ "]"')
    assert goes_on(long, "[" + 20 * "3") == (True, False)
    own = Grammar(kind="lark", source='start: /[0-9]+/ ","', ends_numbers=False)
    assert goes_on(own, 20 * "3") == (True, True)


def test_the_host_chooses_under_a_grammar(model):
    free = Generate(request_id=1, prompt=RawText(text="x"), sampling=Sampling(temperature=0))
    bound = msgspec.structs.replace(free, grammar=PERSON)
    assert [model._answers.begin(request, print).is_best_token for request in (free, bound)] == [True, False]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{", "."),
        ('{"type": "nothing"}', "."),
        ('{"$ref": "#/nowhere"}', "."),
        ('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "no text fits it"),
        (json.dumps({"pattern": "(" * 5000}), "regex parse error"),
        (
            json.dumps({"enum": [f"{i * 7919 % 100_003}" for i in range(30_000)]}),
            "more than 262,144 characters",
        ),
        (
            json.dumps({"properties": {f"p{i}": {"pattern": f"a{{{i % 50}}}b*"} for i in range(3000)}}),
            "too big",
        ),
    ],
    ids=lambda value: value[:30],
)
def test_a_bad_schema(model, source, says):
    with pytest.raises(UsageError, match=f"schema cannot be used: .*{says}") as refused:
        answer(model, RawText(text="x"), grammar=msgspec.structs.replace(PERSON, source=source))
    assert len(refused.value.message) < 300 and refused.value.message.endswith(".")


def test_a_long_chain_of_references(model):
    """It takes more stack than a thread has, and would end the process."""
    chain = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(3000)
    }
    source = json.dumps({"$ref": "#/$defs/a0", "$defs": {**chain, "a3000": {"type": "null"}}})
    text, _, _ = answer(
        model, RawText(text="x"), grammar=msgspec.structs.replace(PERSON, source=source), max_tokens=3
    )
    assert text.startswith("{")


def test_grammars_that_are_compiled_at_once_have_deep_stacks_and_no_other_thread_has(monkeypatch):
    sizes, begin = [], own_thread.begin

    def slowly(*arguments, **options):
        time.sleep(0.02)
        sizes.append(threading.stack_size())
        return begin(*arguments, **options)

    monkeypatch.setattr(own_thread, "begin", slowly)
    compiling = [threading.Thread(target=grammar._in_deep_stack, args=(int,)) for _ in range(3)]
    for thread in compiling:
        thread.start()
        time.sleep(0.01)
    for thread in compiling:
        thread.join()
    assert sizes == [grammar._STACK_BYTES] * 3 and threading.stack_size() == 0


def test_answers_with_one_schema_compile_it_once(model, monkeypatch):
    """A hundred prompts of a request, whose schema takes seconds. Each answer has its own state."""
    compiled = []
    compile = grammar._compiled
    monkeypatch.setattr(grammar, "_compiled", lambda *them: compiled.append(them) or compile(*them))
    grammars = Grammars(model.tokenizer)
    one, other = (grammars.constraint(PERSON, None, "") for _ in range(2))
    first = other.allowed().copy()
    one.accept(model.tokenizer.encode("{")[0])
    assert np.array_equal(other.allowed(), first) and not np.array_equal(one.allowed(), first)
    assert np.array_equal(grammars.constraint(PERSON, None, "").allowed(), first) and len(compiled) == 1


def test_masks_that_take_long(model, monkeypatch):
    """Each takes a tenth of a second, for which other conversations wait."""
    monkeypatch.setattr("engine.runtime.grammar.MAX_WORK_S", 0.05)
    source = json.dumps({"enum": ["x" * 50_000, "x" * 50_001]})
    with pytest.raises(UsageError, match="it takes too long to find out which tokens fit it"):
        answer(
            model, RawText(text="x"), grammar=msgspec.structs.replace(PERSON, source=source), max_tokens=30
        )


def test_a_missing_library(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match="not installed") as error:
        answer(model, RawText(text="x"), grammar=PERSON)
    assert "pip install llguidance" in error.value.hint


def test_a_given_text_has_the_log_probabilities_that_it_would_have_as_an_answer(model):
    _, end, events = answer(model, RawText(text="Once"), logprobs=2, max_tokens=12, ignore_eos=True)
    said = [event for event in events if type(event) is Token]
    eos = min(model.tokenizer.eos_ids)
    forced = (*(token.id for token in said[:8]), eos)
    _, end, events = answer(model, RawText(text="Once"), logprobs=2, max_tokens=10, forced=forced)
    given = [event for event in events if type(event) is Token]
    assert [token.id for token in given[:9]] == list(forced) and end.predicted_n == 10
    assert [(t.logprob, t.top) for t in given[:8]] == [(t.logprob, t.top) for t in said[:8]]


def test_a_schema_holds_after_a_text_that_is_given(model):
    ids = tuple(model.tokenizer.encode("So: "))
    text, end, _ = answer(model, RawText(text="Who? "), forced=ids, grammar=PERSON)
    assert json.loads(text.removeprefix("So: ")).keys() == {"name", "age"} and end.reason == "stop"
    with pytest.raises(UsageError, match="Token ids"):
        answer(model, RawText(text="x"), forced=(1 << 20,))


def test_an_answer_is_at_least_so_long(model):
    ends = tuple((id, 100.0) for id in model.tokenizer.eos_ids)
    for least, forced in ((0, 0), (5, 0), (5, 2)):
        ids = tuple(model.tokenizer.encode("So: "))[:forced]
        _, end, _ = answer(model, RawText(text="Once"), min_tokens=least, forced=ids, logit_bias=ends)
        assert (end.reason, end.predicted_n) == ("stop", least + forced + 1)


HARMONY_TEMPLATE = """\
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor -%}
{#- "<|channel|>analysis<|message|>" "<|start|>assistant<|channel|>final<|message|>" tools to=functions. #}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_gpt_oss_can_be_made_to_call(tmp_path, monkeypatch, seed):
    """The grammar has the headers of messages, too."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
    monkeypatch.setattr(generated_model, "SPECIALS", (*generated_model.SPECIALS, *marks))
    path = generated_model.write(tmp_path / "m.gguf", template=HARMONY_TEMPLATE)
    properties = {"city": {"enum": ["Rome", "Oslo"]}}
    schema = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    tools = json.dumps([{"type": "function", "function": {"name": "look", "parameters": schema}}])
    form = shown_form(HARMONY_TEMPLATE)
    prompt = Chat(messages=(Message(role="user", content="Rome?"),), tools=tools)
    harmony = ReferenceModel(path, 256)
    end_id = harmony.tokenizer.special_tokens["<|end|>"]
    text, end, _ = answer(
        harmony,
        prompt,
        grammar=reply_grammar(form, tools, None, is_required=True),
        sampling=Sampling(temperature=1.5, seed=seed),
        logit_bias=((end_id, 12.0),),  # it does not think for long
    )
    parser = ToolCallParser(form, tools)
    [call] = [*parser.feed(text), *parser.flush()]
    assert (
        end.reason == "stop"
        and call.name == "look"
        and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    )


def test_the_mark_of_a_call_is_its_token(tmp_path):
    """Spelled out, it is nothing that the model has seen."""
    marks = (("<|tool_call>", CONTROL), ("<tool_call|>", CONTROL), ('<|"|>', CONTROL), ("<eos>", CONTROL))
    tokenizer = Tokenizer(byte_level(tmp_path / "v", special=marks))
    tools = json.dumps([{"type": "function", "function": {"name": "stop", "parameters": {}}}])
    grammar = reply_grammar(GEMMA, tools, None, is_required=True)
    constraint = Grammars(tokenizer).constraint(grammar, None, "")
    reply = tokenizer.encode("<|tool_call>call:stop{}<tool_call|>", special=True)
    assert tokenizer.special_tokens["<|tool_call>"] == reply[0]
    for id in reply:
        words = constraint.allowed()
        assert words[id // 32] >> np.uint32(id % 32) & np.uint32(1), tokenizer.piece(id)
        constraint.accept(id)
