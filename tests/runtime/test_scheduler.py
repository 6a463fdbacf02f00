"""Many requests at once over a runner without a model."""

import json
import statistics

import numpy as np
import pytest

from engine.errors import ContextFullError
from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol.events import TOKEN_GAP, Generate, Grammar, Prefilling, Sampling, Token, TokenIds
from engine.runtime import checkpoints, scheduler
from engine.runtime.answer import Answers
from engine.runtime.grammar import Constraint
from engine.runtime.kv_blocks import KVGroup
from engine.runtime.pace import Pace
from engine.runtime.scheduler import Scheduler
from tests import generated_model
from tests.runtime.fake_batch_runner import (
    VOCAB,
    FakeBatchRunner,
    FakeRowSampler,
    FakeStateRunner,
    greedy_reply,
    next_logits,
)
from tests.thorough import rarely


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf", layers=1)
    return Answers(PromptEncoder(GGUF(path)), context_length=1000)


class Bench:
    """A scheduler and what its requests got."""

    def __init__(self, answers, runner, token_gap=TOKEN_GAP, **options):
        self.answers, self.runner = answers, runner
        self.slots, self.events, self.ends = [], {}, {}
        self.scheduler = Scheduler(runner, self.slots.append, token_gap=token_gap, **options)
        self.stopped = set()

    def ask(self, prompt, n=8, client="", **request):
        id = len(self.events)
        self.events[id] = []
        request = {"sampling": Sampling(temperature=0), "ignore_eos": True} | request
        generate = Generate(
            request_id=id, prompt=TokenIds(ids=tuple(prompt)), max_tokens=n, client=client, **request
        )
        answer = self.answers.begin(generate, self.events[id].append)
        self.scheduler.add(answer, lambda: id in self.stopped, lambda end: self.ends.setdefault(id, end))
        return id

    def run(self, rounds=1000):
        for _ in range(rounds):
            if not self.scheduler.busy:
                assert all(c.held == 0 for c in self.scheduler.blocks.counts())
                break
            self.scheduler.step()
        return self

    def told(self, id):
        """Tokens, and what is reported of their probabilities."""
        return [(event.id, event.logprob, event.top) for event in self.events[id] if isinstance(event, Token)]

    def reply(self, id):
        return [event.id for event in self.events[id] if isinstance(event, Token)]


@pytest.fixture(params=[FakeBatchRunner, FakeStateRunner])
def bench(answers, request):
    def make(*args, token_gap=TOKEN_GAP, **options):
        return Bench(answers, request.param(*args, **options), token_gap)

    return make


def prompts(n, seed=0, most=200):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, draw.integers(1, most)).tolist() for _ in range(n)]


@pytest.mark.parametrize("blocks", [64, 20])  # 20: hardly more than one conversation needs
def test_each_gets_what_it_gets_alone(bench, blocks):
    bench = bench(groups=(KVGroup(None, blocks), KVGroup(40, 64)))
    asked = [(prompt, 5 + 17 * (i % 4)) for i, prompt in enumerate(prompts(13))]
    for i, (prompt, n) in enumerate(asked):
        bench.ask(prompt, n, client=str(i % 3))
        bench.run(3)  # they come while others are answered
    bench.run()
    for id, (prompt, n) in enumerate(asked):
        assert bench.reply(id) == greedy_reply(prompt, n)
        end = bench.ends[id]
        assert (end.reason, end.prompt_n, end.predicted_n) == ("length", len(prompt), n)
        progress = [event for event in bench.events[id] if isinstance(event, Prefilling)]
        assert [event.done for event in progress] == sorted(event.done for event in progress)
        assert progress[-1].done == progress[-1].total == len(prompt)
    assert max(rows for phase, rows in bench.runner.steps if "prefill" not in phase) == 4
    assert bench.slots[-1].slots == (None,) * 4 and bench.slots[-1].waiting == 0


def test_what_others_have_computed_is_not_computed_again(bench):
    bench = bench()
    [system] = prompts(1, seed=3, most=300)
    system = (system * 300)[:300]
    ids = [bench.ask([*system, i]) for i in range(4)]
    bench.run()
    assert [bench.reply(id) for id in ids] == [greedy_reply([*system, i], 8) for i in range(4)]
    prefilled = sum(n for phase, n in bench.runner.steps if "prefill" in phase)
    assert prefilled < 300 + 4 * 2 * 32  # about once, though all came at the same time
    assert sum(bench.ends[id].cached_n for id in ids) + prefilled == 4 * 300
    again = bench.ask([*system, 0, *bench.reply(0), 7])
    bench.run()
    assert bench.ends[again].cached_n == 300 + 8
    fresh = bench.ask([*system, 0], fresh=True)
    bench.run()
    assert bench.ends[fresh].cached_n == 0 and bench.reply(fresh) == bench.reply(0)


@pytest.mark.parametrize("seed", [0, rarely(1), rarely(2)])
def test_conversations_go_on_where_others_were(bench, seed, monkeypatch):
    """At any place of an earlier one, which may still be answered or was cancelled; with hardly enough room."""
    monkeypatch.setattr(checkpoints, "EVERY", 8)
    monkeypatch.setattr(checkpoints, "WORTH_A_STEP", 12)
    bench, draw = bench(groups=(KVGroup(None, 24), KVGroup(40, 64))), np.random.default_rng(seed)
    monkeypatch.setattr(bench.answers._prompts.tokenizer, "eos_ids", {3, 4, 5})
    asked = [(prompts(1, seed)[0], 20)]
    bench.ask(*asked[0])
    for _ in range(30):
        bench.run(int(draw.integers(0, 12)))
        before = int(draw.integers(0, len(asked)))
        text = [*asked[before][0], *bench.reply(before)]
        asked.append(
            ([*text[: draw.integers(0, len(text) + 1)], *draw.integers(0, 9, 30).tolist()][-500:], 20)
        )
        bench.ask(*asked[-1], client=str(before % 2), ignore_eos=bool(before % 3))
        if draw.random() < 0.3:
            bench.stopped.add(before)
    bench.run()
    for id, (prompt, n) in enumerate(asked):
        said = bench.reply(id)
        assert said == greedy_reply(prompt, n)[: len(said)]
        assert bench.ends[id].reason != "length" or len(said) == n


def test_a_request_is_cancelled_in_every_phase(bench):
    bench = bench(2)
    replying, prefilling, waiting, other = (bench.ask([i] * n, 50) for i, n in enumerate((9, 900, 9, 9)))
    bench.run(3)
    assert bench.reply(replying) and not bench.reply(prefilling)
    assert [slot.phase for slot in bench.slots[-1].slots if slot]  # it was reported
    for id in (replying, prefilling, waiting):
        bench.stopped.add(id)
    bench.run(1)
    assert [bench.ends[id].reason for id in (replying, prefilling, waiting)] == ["cancelled"] * 3
    assert bench.ends[replying].predicted_n == len(bench.reply(replying))
    bench.run()
    assert bench.reply(other) == greedy_reply([3] * 9, 50)


def test_the_next_step_runs_ahead_unless_something_else_is_due(bench, monkeypatch):
    bench = bench(2)
    ends_early = greedy_reply([1, 2, 3], 12)
    tokenizer = bench.answers._prompts.tokenizer
    monkeypatch.setattr(tokenizer, "eos_ids", {ends_early[-1]})
    first, other = bench.ask([1, 2, 3], 50, ignore_eos=False), bench.ask([4] * 9, 30)
    bench.run(20)
    assert bench.ends[first].reason == "stop" and bench.reply(first) == ends_early
    later = bench.ask([5] * 40, 7)  # in the slot that is free
    bench.run()
    assert bench.reply(other) == greedy_reply([4] * 9, 30) and bench.reply(later) == greedy_reply([5] * 40, 7)
    phases = [phase for phase, _ in bench.runner.steps]
    if not bench.runner.state_slots:  # else a state is kept before the first token
        assert phases.count("decode") == 1 and bench.runner.begun_ahead == 1
    assert phases.count("ahead") > 2 * phases.count("decode")
    host = bench.ask([6], 9, sampling=Sampling(seed=1, top_k=1))
    bench.run()
    assert bench.runner.steps[-9:] == [("decode", 1)] * 9 and bench.reply(host) == greedy_reply([6], 9)


# That it calls itself many names gives it no more.
@pytest.mark.parametrize("name", ["greedy", "name {}@greedy"])
def test_clients_take_turns_however_much_each_asks(bench, name):
    bench = bench(2)
    many = [bench.ask([1, 2, i], 40, client=name.format(i)) for i in range(6)]
    bench.run(4)
    one = bench.ask([9], 5, client="modest")
    bench.run(10)
    assert one in bench.ends and len(bench.ends) == 1  # a slot was given up for it
    bench.run()
    assert [bench.reply(id) for id in many] == [greedy_reply([1, 2, i], 40) for i in range(6)]


def test_samples_penalties_and_log_probabilities_are_those_of_one_conversation(bench):
    bench = bench()
    hot = {"sampling": Sampling(temperature=1.5, repeat_penalty=1.3, seed=5), "logprobs": 2}
    alone = bench.ask([5, 6, 7], 9, **hot)
    bench.run()
    beside = [bench.ask([5, 6, 7], 9, **hot), bench.ask([5, 6], 20), bench.ask([1], 9, **hot)]
    bench.run()
    assert bench.reply(beside[0]) == bench.reply(alone) != bench.reply(beside[2])
    assert bench.told(beside[0]) == bench.told(alone)
    logits, [(token, logprob, _), *_] = next_logits([5, 6, 7]).astype(float), bench.told(alone)
    assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()))


def test_rows_sampled_by_the_runner_have_the_tokens_that_the_host_would_choose(bench, answers):
    kinds = [
        {"sampling": Sampling(temperature=1.5, repeat_penalty=1.3, seed=5)},
        {"sampling": Sampling(temperature=0.7, seed=6)},
        {"sampling": Sampling(temperature=1.5, seed=7, presence_penalty=1), "logit_bias": ((3, 4.0),)},
        {"sampling": Sampling(temperature=1.5, seed=7, top_k=0)},  # the runner declines this
        {"sampling": Sampling(temperature=0, repeat_penalty=1.5)},
        {"sampling": Sampling(temperature=1, seed=8), "logprobs": 1},
        {"logprobs": 3},
        {},
    ]
    asked = [(prompt, 10 + 9 * (i % 5), kinds[i % 8]) for i, prompt in enumerate(prompts(14, most=100))]
    replies = []
    for runner in (FakeBatchRunner(), FakeRowSampler(3, (KVGroup(None, 13), KVGroup(40, 64)))):
        one = Bench(answers, runner)
        ids = []
        for prompt, n, kind in asked:
            ids.append(one.ask(prompt, n, **kind))
            one.run(4)
        replies.append([one.run().told(id) for id in ids])
    assert replies[0] == replies[1]
    alone = Bench(answers, FakeRowSampler())
    for kind, logits_needed in zip(kinds, (0, 0, 0, 1, 0, 0, 0, 0), strict=True):
        del alone.runner.steps[:]
        alone.ask([1, 2], 9, **kind)
        alone.run()
        assert (("ahead", 1) in alone.runner.steps) != logits_needed


def test_steps_with_prompts_run_ahead_too(bench):
    bench = bench()
    reply = bench.ask([1, 2, 3], 60)
    bench.run(10)
    bench.runner.steps.clear()
    prompts = [[4] * 400, [5] * 350]
    ids = [bench.ask(prompt, 5) for prompt in prompts]
    bench.run()
    assert bench.reply(reply) == greedy_reply([1, 2, 3], 60)
    assert [bench.reply(id) for id in ids] == [greedy_reply(prompt, 5) for prompt in prompts]
    phases = [phase for phase, _ in bench.runner.steps]
    assert phases.count("prefill ahead") > phases.count("prefill")
    assert phases.count("ahead") > 4 * phases.count("decode")


@pytest.mark.parametrize("stopped", ["prompt", "reply"])
def test_what_ends_in_a_step_that_runs_ahead_harms_nobody(bench, stopped):
    bench = bench(2)
    ids = {"reply": bench.ask([1, 2, 3], 60)}
    bench.run(10)
    ids["prompt"] = bench.ask([4] * 900, 5)
    bench.run(5)
    assert bench.runner.pieces_ahead
    bench.stopped.add(ids[stopped])
    later = bench.ask([4] * 300, 5)
    bench.run()
    wanted = {ids["reply"]: greedy_reply([1, 2, 3], 60), ids["prompt"]: greedy_reply([4] * 900, 5)}
    assert bench.ends[ids[stopped]].reason == "cancelled"
    assert bench.reply(later) == greedy_reply([4] * 300, 5)
    [other] = set(wanted) - {ids[stopped]}
    assert bench.reply(other) == wanted[other]


def test_grammars_run_ahead_and_have_the_tokens_that_the_host_would_choose(tmp_path, monkeypatch):
    """Beside other replies, with hardly enough room, some of them cancelled. Each mask is for one step."""
    encoder = PromptEncoder(GGUF(generated_model.write(tmp_path / "m.gguf", layers=1)))
    monkeypatch.setattr(encoder.tokenizer, "eos_ids", {3})
    answers = Answers(encoder, context_length=1000)
    numbers = Grammar(kind="lark", source='start: "[" NUMBER ("," NUMBER){,9} "]"\nNUMBER: /[1-9][0-9]{0,2}/')
    kinds = [
        {"grammar": numbers},
        {},
        {"grammar": numbers, "sampling": Sampling(temperature=1.5, seed=5), "logprobs": 2},
        {"sampling": Sampling(temperature=1.5, seed=7)},
        {"grammar": numbers, "sampling": Sampling(temperature=2, top_k=9, seed=5, repeat_penalty=1.3)},
    ]
    asked = [(prompt, 10 + 9 * (i % 5), kinds[i % 5]) for i, prompt in enumerate(prompts(15, most=100))]
    benches = Bench(answers, FakeBatchRunner()), Bench(answers, FakeRowSampler(3, (KVGroup(None, 13),)))
    for bench in benches:
        for id, (prompt, n, kind) in enumerate(asked):
            bench.ask(prompt, n, **kind)
            bench.run(4)
            if id % 6 == 4:
                bench.stopped.add(id - 1)
        bench.run()
    host, device = benches
    for id, (*_, kind) in enumerate(asked):
        reasons = {bench.ends[id].reason for bench in benches}
        assert len(reasons) == 1 or "cancelled" in reasons
        n = min(len(host.told(id)), len(device.told(id)))
        assert host.told(id)[:n] == device.told(id)[:n]
        text = "".join(event.text for event in device.events[id] if isinstance(event, Token)).removesuffix(
            "$"
        )
        if "grammar" in kind and device.ends[id].reason == "stop":
            assert 0 < len(json.loads(text)) <= 10
    assert [device.ends[id].reason for id in range(0, 15, 5)].count("stop") == 3
    phases = [phase for phase, _ in device.runner.steps]
    assert phases.count("ahead") > phases.count("decode")


def test_a_grammar_that_fails_ends_its_own_request(answers, monkeypatch):
    """Before the first token, and later, of a reply that is sampled by the runner."""
    bench, steps = Bench(answers, FakeRowSampler()), iter(range(100))
    lark = {"grammar": Grammar(kind="lark", source="start: /[a-f]+/")}
    monkeypatch.setattr(Constraint, "allowed", lambda _: 1 / (next(steps) not in (0, 4)) and None)
    bad, late = bench.ask([1, 2], 9, **lark), bench.ask([1, 3], 9, **lark)
    good = bench.ask([3, 4], 9)
    bench.run()
    assert isinstance(bench.ends[bad], ZeroDivisionError) and not bench.reply(bad)
    assert isinstance(bench.ends[late], ZeroDivisionError) and bench.reply(late)
    assert bench.reply(good) == greedy_reply([3, 4], 9)


def test_failures_end_the_requests_that_they_concern(bench, monkeypatch):
    bench = bench()
    bad, good = bench.ask([1, 2], 9, logprobs=1), bench.ask([3, 4], 9)
    monkeypatch.setattr("engine.runtime.jobs.log_probabilities", lambda *_: 1 / 0)
    bench.run()
    assert isinstance(bench.ends[bad], ZeroDivisionError) and bench.reply(good) == greedy_reply([3, 4], 9)
    broken, waiting = [bench.ask([1, i], 9) for i in range(4)], bench.ask([5], 9)
    run = bench.runner.run
    monkeypatch.setattr(bench.runner, "run", lambda *_: 1 / 0)
    bench.run(1)
    assert all(isinstance(bench.ends[id], ZeroDivisionError) for id in broken)
    monkeypatch.setattr(bench.runner, "run", run)
    bench.run()
    assert bench.reply(waiting) == greedy_reply([5], 9)


def test_a_conversation_for_which_there_is_no_room(bench):
    bench = bench(groups=(KVGroup(None, 3),))
    id, none = bench.ask([1] * 60, 80), bench.ask([1], 0)
    assert bench.ends[none].predicted_n == 0
    bench.run()
    assert isinstance(bench.ends[id], ContextFullError)
    assert len(bench.reply(id)) == 37


def test_a_bias_makes_tokens_more_or_less_probable(bench):
    bench = bench()
    [first, second] = next_logits([5, 6]).argsort()[::-1][:2].tolist()
    asked = [{}, {"logit_bias": ((first, -100), (VOCAB, 5))}, {"logit_bias": ((7, 100),)}]
    ids = [bench.ask([5, 6], 1, **bias) for bias in asked]
    bench.run()
    assert [bench.reply(id) for id in ids] == [[first], [second], [7]]


def prefills(bench):
    """The sizes of the pieces of prompts so far."""
    return [n for phase, n in bench.runner.steps if phase.startswith("prefill")]


def test_prompts_that_come_together_are_read_with_the_whole_device(bench):
    """Though the first ones of them reply already: the first tokens of all come soonest so."""
    bench = bench()
    for i in range(4):
        bench.ask([i] * 500, 40)
    bench.run(16)
    assert prefills(bench) == [128, 128, 128, 115] * 4
    assert all(bench.reply(id) for id in range(4))


def test_several_short_prompts_are_read_before_the_next_token(bench, monkeypatch):
    """And a long one piece by piece."""
    monkeypatch.setattr(Pace, "burst", lambda pace, size: 3 * size)
    bench = bench(6)
    for i in range(4):
        bench.ask([i] * 120, 40)
    long = bench.ask([7] * 400, 1)
    bench.run(1)
    assert prefills(bench)[:3] == [119] * 3 and [bool(bench.reply(id)) for id in range(4)] == [True] * 3 + [
        False
    ]
    bench.run(1)
    assert prefills(bench)[3:5] == [119, 128] and bench.reply(3) and not bench.reply(long)
    bench.run()
    assert bench.reply(long) == greedy_reply([7] * 400, 1)


@pytest.mark.parametrize(
    ("own", "read_s", "after_s", "pieces"),
    [
        (100, 0.0, 0.04, [99]),
        (90, 0.0, 0.04, [32, 32, 32, 3]),  # it takes longer to read than that of the reply took
        (100, 0.0, 0.06, [32, 32, 32, 3]),
        (100, 0.1, 0.01, [32, 32, 32, 3]),
    ],
)
def test_a_reply_waits_for_prompts_like_its_own_that_came_with_it(
    bench, monkeypatch, own, read_s, after_s, pieces
):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Pace, "room", lambda pace, sizes: sizes[0])
    bench = bench()
    bench.ask([1] * own, 800)
    now[0] += read_s
    bench.run(20)
    bench.runner.steps.clear()
    now[0] += after_s
    bench.ask([2] * 100, 4)
    now[0] += 10.0  # when it came is what counts
    bench.run(6)
    assert prefills(bench) == pieces


@pytest.mark.parametrize(("gap", "piece"), [(2.0, 32), (4.0, 128)])
def test_how_much_longer_a_step_may_take_is_an_option(bench, monkeypatch, gap, piece):
    """A step takes 10 ms, and 0.2 ms more for each token of a prompt."""
    monkeypatch.setattr(scheduler, "TOGETHER_S", 0.0)
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    bench = bench(token_gap=gap)
    run = bench.runner.run

    def timed_run(slots, ahead=None):
        now[0] += 0.01 + 0.0002 * sum(len(slot.inputs) for slot in slots if slot.want == "none")
        return run(slots, ahead)

    monkeypatch.setattr(bench.runner, "run", timed_run)
    bench.ask([1], 900)
    bench.run(20)
    bench.ask([2] * 900, 4)
    bench.run(12)
    assert statistics.mode(prefills(bench)) == piece


def test_what_the_last_step_held_is_reported(bench, monkeypatch):
    monkeypatch.setattr(scheduler, "REPORT_S", 0.0)
    monkeypatch.setattr(scheduler, "TOGETHER_S", -1.0)
    monkeypatch.setattr(Pace, "room", lambda pace, sizes: sizes[0])
    bench = bench()
    bench.ask([1] * 200, 30)
    bench.run(4)
    bench.ask([2] * 50, 2)
    bench.run()
    held = [(slots.rows, slots.prompt_tokens, slots.room) for slots in bench.slots]
    assert held[:3] == [(0, 128, 128), (1, 71, 128), (1, 0, 0)]
    prompt = next(i for i, step in enumerate(held) if step[2] == 32)
    assert held[prompt : prompt + 3] == [(1, 32, 32), (2, 17, 32), (2, 0, 0)]
    assert held[-1] == (0, 0, 0)


def test_short_prompts_pass_long_ones_for_a_while(bench, monkeypatch):
    monkeypatch.setattr(Pace, "burst", lambda pace, size: size)
    bench = bench(2)
    long = bench.ask([1] * 601, 1)
    bench.run(1)
    short = [bench.ask([2 + i] * 129, 1) for i in range(20)]
    bench.run(8)
    assert bench.reply(short[0]) and not bench.reply(long)
    bench.run(13)
    assert bench.reply(long) and not bench.reply(short[-1])
