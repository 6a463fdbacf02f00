"""Two engines asked the same: what each gets, who goes first, where they part, and one failing alone."""

import asyncio
import math

import pytest
from msgspec.structs import replace

from app.comparison import comparison_engine
from app.comparison.common_prefix import CommonPrefix
from app.comparison.comparison_engine import ComparisonEngine, answered_together, compare_with_llama_server
from app.comparison.report import report
from engine.errors import TemplateError
from engine.formats.templates.template import Prompt
from engine.measure import counters, jetson_counters
from engine.protocol.events import (
    Chat,
    Counter,
    EngineOptions,
    Event,
    Failed,
    Finished,
    Generate,
    Message,
    RawText,
    Ready,
    Sampling,
    Thinking,
    Token,
    TokenIds,
)
from tests import generated_model, synthetic
from tests.synthetic import _pieces
from tests.waiting import until
from widgets.dashboard.comparison_data import figure_rows

HELLO = Chat(messages=(Message(role="user", content="hello"),))
QUICK = {"load_s": 0.0, "prefill_s": 0.02, "rate": 400, "tokens": 12}


class Spy:
    """An engine that tells what it was asked and when it was busy."""

    def __init__(self, engine, log, name):
        self.engine, self.log, self.name = engine, log, name
        self.requests = []
        self.other_ids_from = 1 << 30

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __setattr__(self, name, value):
        vars(self.engine if name == "on_event" else self)[name] = value

    async def generate(self, request):
        self.requests.append(request)
        self.log.append(f"{self.name} begins")
        async for event in self.engine.generate(request):
            if isinstance(event, Token) and event.id >= self.other_ids_from:
                event = replace(event, id=event.id + 100)
            yield event
        self.log.append(f"{self.name} ends")


@pytest.fixture
async def compare():
    made = []

    def make(left=QUICK, right=QUICK, encode=None, **options):
        log = []
        ours = Spy(synthetic.engine(**{**QUICK, **left}), log, "L")
        peer = Spy(synthetic.engine(**{**QUICK, **right}), log, "R")
        comparison = ComparisonEngine(
            ours,
            lambda ready: peer,
            lambda: encode or (lambda prompt, effort, most: Prompt([5, 6, 7])),
            **options,
        )
        comparison.spies, comparison.log = (ours, peer), log
        made.append(comparison)
        return comparison

    yield make
    for comparison in made:
        await comparison.close()


def ask(prompt=HELLO, **fields):
    return Generate(request_id=9, prompt=prompt, **fields)


async def collect(stream):
    return [event async for event in stream]


def said(events, kind=Token):
    return "".join(event.text for event in events if type(event) is kind)


async def test_both_are_asked_for_the_same_effort(compare):
    comparison = compare(encode=lambda prompt, effort, most: Prompt([{"high": 8}[effort]]))
    await collect(comparison.generate(ask(sampling=Sampling(effort="high"))))
    asked = [spy.requests[0].prompt for spy in comparison.spies]
    assert asked == [TokenIds(ids=(8,))] * 2


async def test_both_do_the_same_work(compare):
    comparison = compare()
    events = await collect(comparison.generate(ask(max_tokens=8, sampling=Sampling(temperature=1.0))))
    for spy in comparison.spies:
        [request] = spy.requests
        assert request.prompt == TokenIds(ids=(5, 6, 7))
        assert (request.sampling.temperature, request.fresh, request.max_tokens) == (0, True, 8)
    assert isinstance(events[-1], Finished)
    assert events[-1].request_id == 9
    view = comparison.view()
    assert view.complete and view.same == 8 and view.difference is None
    assert said(events) == view.left.text == view.right.text
    for column in (view.left, view.right):
        assert 0 < column.decode < 500
        assert column.first_token_s >= 0.02
        assert column.prefill is None, "three tokens are no speed"
        assert column.memory_bytes > 1_000_000
        assert (column.tokens, column.problem, column.state) == (8, "", "done, cut at the limit")


async def test_a_prompt_of_enough_tokens_has_a_prefill_rate(compare):
    comparison = compare(encode=lambda prompt, effort, most: Prompt([5] * 32))
    await collect(comparison.generate(ask(max_tokens=8)))
    view = comparison.view()
    assert view.left.prefill > 0 and view.right.prefill > 0


async def test_they_take_turns_and_the_first_alternates(compare):
    comparison = compare()
    for _ in range(3):
        await collect(comparison.generate(ask(max_tokens=2)))
    left, right = ["L begins", "L ends"], ["R begins", "R ends"]
    assert comparison.log == [*left, *right, *right, *left, *left, *right]


async def test_together_they_compete(compare):
    comparison = compare(together=True)
    heard: list[Event] = []
    comparison.ours.on_event = heard.append
    await collect(comparison.start())
    await collect(comparison.generate(ask()))
    assert sorted(comparison.log[:2]) == ["L begins", "R begins"]
    assert comparison.view().together and answered_together(comparison)
    # No speed that says something of the model.
    assert not any(isinstance(event, Finished) for event in heard)
    comparison.together = False  # from the next prompt on
    assert comparison.view().together
    await collect(comparison.generate(ask()))
    assert not comparison.view().together and not answered_together(comparison)
    assert isinstance(heard[-1], Finished)


def test_no_answer_waits_for_counters_that_are_not_the_cpus(monkeypatch):
    monkeypatch.setattr(counters, "is_jetson", lambda root: True)
    # A Jetson's power mode is asked of a program.
    monkeypatch.setattr(jetson_counters.subprocess, "run", None)
    read = ComparisonEngine(None, None, None)._read_counters()
    assert {"CPU load", "memory"} <= {counter.name for counter in read}


@pytest.mark.parametrize(
    ("load", "owned", "remark"),
    [(43.4, True, "other programs take 43 % of the CPU"), (12.0, True, ""), (43.4, False, "")],
)
async def test_what_other_programs_take_is_said_beside_the_figures(compare, load, owned, remark):
    """Where the other engine is a process of ours: else it may be that which takes so much."""
    comparison = compare(
        read_counters=lambda: (
            Counter(name="other load", value=load, unit="%"),
            Counter(name="CPU load", value=99.0),
        )
    )
    if not owned:
        comparison.spies[1].pid = None
    await collect(comparison.generate(ask(max_tokens=2)))
    assert comparison.view().remark == remark
    assert report(comparison.view()).count(remark or "⚠") == bool(remark)
    comparison.forget()
    assert not comparison.view().remark


async def test_other_programs_are_looked_at_while_the_answers_come(compare, monkeypatch):
    monkeypatch.setattr(comparison_engine, "WATCH_S", 0.001)
    comparison = compare(read_counters=lambda: (Counter(name="other load", value=43.4, unit="%"),))
    async for event in comparison.generate(ask(max_tokens=2)):
        if isinstance(event, Token):
            await until(lambda: comparison.view().remark)
            assert not comparison.view().complete
            assert all(row.ratio is None for row in figure_rows(comparison.view()))
            return
    raise AssertionError("there was no token")


async def test_where_they_part_and_how_probable_both_ways_were(compare):
    comparison = compare()
    comparison.spies[1].other_ids_from = 4
    await collect(comparison.generate(ask()))
    view = comparison.view()
    assert (view.same, view.difference.position) == (4, 5)
    assert view.left.same == view.right.same == len("".join(_pieces(view.left.text)[:4]))
    asked = [spy.requests[-1] for spy in comparison.spies]
    assert [request.prompt for request in asked] == [TokenIds(ids=(5, 6, 7, 0, 1, 2, 3))] * 2
    assert all(request.logprobs and request.max_tokens == 1 for request in asked)
    # To the synthetic engine token i has the probability exp(-0.5 - i); the right one's ids are 100 more.
    assert view.difference.left_odds == (pytest.approx(math.exp(-4.5)), None)
    assert view.difference.right_odds == (pytest.approx(math.exp(-4.5)), None)


async def test_thinking_reaches_the_chat_as_such(compare):
    comparison = compare({"text": "<think>\nHm. </think>\n\nYes ", "tokens": 5}, {"tokens": 5})
    events = await collect(comparison.generate(ask()))
    assert said(events, Thinking).strip() == "Hm."
    assert said(events).strip() == "Yes"
    assert comparison.view().left.text.startswith("<think>")


async def test_raw_text_reaches_it_unsplit(compare):
    comparison = compare({"text": "<think>\nHm. </think>\n\nYes ", "tokens": 5}, {"tokens": 5})
    assert said(await collect(comparison.generate(ask(RawText(text="x"))))).startswith("<think>")


@pytest.mark.parametrize("peer_first", [False, True])
async def test_one_that_fails_leaves_the_other_unharmed(compare, peer_first):
    comparison = compare(right={"failure": "ContextFullError", "fail_at": 3})
    comparison._peer_first = peer_first
    events = await collect(comparison.generate(ask()))
    assert events[-1].reason == "stop"
    view = comparison.view()
    assert view.right.problem.startswith("This is a ContextFullError in answer to")
    assert view.left.tokens == 12 and view.left.problem == ""
    assert view.complete and view.same == 3


async def test_ours_failing_is_told_and_the_other_answers_all_the_same(compare):
    comparison = compare({"failure": "ContextFullError", "fail_at": 3})
    events = await collect(comparison.generate(ask()))
    assert isinstance(events[-1], Failed)
    assert (events[-1].kind, events[-1].request_id) == ("context", 9)
    assert comparison.view().right.tokens == 12


async def test_one_that_does_not_start(compare):
    comparison = compare(right={"load_failure": "ModelFileError"})
    for _ in range(2):
        events = await collect(comparison.generate(ask()))
        assert events[-1].reason == "stop"
        assert "ModelFileError" in comparison.view().right.problem
        assert len(comparison.spies[1].requests) == 0


async def test_one_that_dies_comes_back(compare):
    comparison = compare(right={"die_at": 4})
    await collect(comparison.generate(ask()))
    assert "died" in comparison.view().right.problem
    comparison.spies[1].engine._command = synthetic.engine(**QUICK)._command
    await collect(comparison.generate(ask()))
    view = comparison.view()
    assert view.right.problem == "" and view.right.tokens == 12


async def test_a_prompt_that_cannot_be_encoded(compare):
    def encode(prompt, effort, most):
        raise TemplateError("The template refuses.", "Start a new chat.")

    comparison = compare(encode=encode)
    await collect(comparison.start())
    [failed] = await collect(comparison.generate(ask()))
    assert (failed.kind, failed.message, failed.request_id) == ("template", "The template refuses.", 9)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("peer_first", [False, True])
async def test_stopping_ends_both(compare, together, peer_first):
    slow = {"rate": 50, "tokens": 1000}
    comparison = compare(slow, slow, together=together)
    comparison._peer_first = peer_first
    await collect(comparison.start())
    answer = asyncio.create_task(collect(comparison.generate(ask())))
    while not (comparison.view().left.tokens or comparison.view().right.tokens):
        await asyncio.sleep(0.01)
    await comparison.stop()
    events = await asyncio.wait_for(answer, 60)
    assert events[-1].reason == "cancelled"
    assert len(comparison.log) == (4 if together else 2)
    first, second = ("right", "left") if peer_first else ("left", "right")
    assert getattr(comparison.view(), first).state == "stopped"
    assert getattr(comparison.view(), second).state == ("stopped" if together else "not asked")
    await collect(comparison.generate(ask(max_tokens=2)))
    assert comparison.view().complete


async def test_stopping_while_the_other_one_loads(compare):
    comparison = compare(right={"load_s": 600.0})
    await collect(comparison.start())
    assert comparison.view().right.state.startswith(("starting", "loading"))
    answer = asyncio.create_task(collect(comparison.generate(ask())))
    await asyncio.sleep(0)  # it has begun
    assert (comparison.view().asked, comparison.view().left.state) == ("hello", "waits for llama.cpp")
    await comparison.stop()
    assert (await asyncio.wait_for(answer, 60))[-1].reason == "cancelled"


async def test_the_comparison_ends_and_ours_goes_on(compare):
    comparison = compare()
    await collect(comparison.start())
    await collect(comparison.generate(ask()))
    ours = await comparison.release()
    assert ours.pid is not None
    assert comparison.spies[1].pid is None
    assert (await collect(ours.generate(ask())))[-1].reason == "stop"


async def test_what_was_compared_is_forgotten_with_its_conversation(compare):
    comparison = compare()
    await collect(comparison.start())
    await collect(comparison.generate(ask()))
    assert comparison.view().asked == "hello"
    comparison.forget()
    view = comparison.view()
    assert (view.asked, view.left.text, view.right.text, view.complete) == ("", "", "", False)
    assert (view.left.state, view.right.state, view.left.tokens, view.left.decode) == (
        "ready",
        "ready",
        0,
        None,
    )


async def test_the_view_before_anything(compare):
    view = compare().view()
    assert (view.left.name, view.right.name, view.complete, view.same) == ("orin-chat", "llama.cpp", False, 0)


# --- how far two answers are the same -------------------------------------------------------------------


def tokens(*pairs):
    return [Token(request_id=1, id=id, text=text) for id, text in pairs]


@pytest.mark.parametrize(
    ("a", "b", "same", "differs"),
    [
        ([], [], 0, False),
        ([(1, "a"), (2, "b")], [(1, "a")], 1, False),
        ([(1, "a"), (2, "b")], [(1, "a"), (3, "c")], 1, True),
        ([(1, "a"), (2, ""), (3, "é")], [(1, "a"), (-1, ""), (3, "é")], 3, False),
        ([(1, "a"), (2, ""), (3, "é")], [(1, "a"), (-1, "")], 1, False),  # not known yet
        ([(1, "a"), (2, ""), (3, "é")], [(1, "a"), (-1, ""), (3, "è")], 1, True),
        ([(1, "a"), (2, ""), (3, "é")], [(1, "a"), (-1, ""), (4, "è")], 1, True),
        ([(1, "\ufffd"), (2, ""), (3, "\ufffdy")], [(1, ""), (-1, ""), (3, "\ufffdy")], 3, False),
    ],
)
def test_the_common_prefix(a, b, same, differs):
    prefix = CommonPrefix()
    prefix.update(tokens(*a), tokens(*b))
    assert (prefix.length, prefix.ended) == (same, differs)


def test_the_common_prefix_grows_with_the_answers():
    prefix = CommonPrefix()
    a, b = (tokens(*((i, "x") for i in range(n))) for n in (9, 6))
    b += tokens((99, "y"))
    for n in range(10):
        prefix.update(a[:n], b)
        assert prefix.length == min(n, 6)
    assert prefix.ended


# --- with a real llama-server ---------------------------------------------------------------------------


@pytest.fixture
async def real(llama_server, tmp_path, home, monkeypatch):
    from engine.protocol.client import LocalEngine

    path = str(generated_model.write(tmp_path / "noise.gguf", architecture="qwen3"))
    comparison = compare_with_llama_server(
        LocalEngine(EngineOptions(model_path=path, backend="CPU", context_length=256)), llama_server
    )
    yield comparison
    await comparison.close()


async def test_a_real_pair(real):
    events = await collect(real.start())
    assert isinstance(events[-1], Ready)
    events = await collect(real.generate(ask(max_tokens=48, ignore_eos=True)))
    assert events[-1].predicted_n == 48
    view = real.view()
    assert view.complete
    assert (view.left.problem, view.right.problem) == ("", "")
    assert view.left.prompt_tokens == view.right.prompt_tokens == events[-1].prompt_n
    assert view.left.decode and view.right.decode
    assert view.left.gbps and view.right.gbps and view.left.share
    if view.difference:  # both round, each in its way
        for odds in (view.difference.left_odds, view.difference.right_odds):
            assert odds[0] is not None and odds[1] is not None
            assert abs(math.log(odds[0] / odds[1])) < 0.5
    else:
        assert view.same > 40


async def test_no_llama_server(monkeypatch, tmp_path, home):
    from engine.protocol.client import LocalEngine

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    ours = synthetic.engine(**QUICK)
    assert isinstance(ours, LocalEngine)
    path = generated_model.write(tmp_path / "noise.gguf")
    ours.options = EngineOptions(model_path=str(path), backend="CPU")
    comparison = compare_with_llama_server(ours)
    try:
        events = await collect(comparison.generate(ask()))
        assert events[-1].reason == "stop"
        assert comparison.view().right.problem.startswith("llama.cpp's llama-server was not found. Install")
    finally:
        await comparison.close()
