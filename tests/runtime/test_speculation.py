"""Guesses of next tokens: the text is the same as without them, and they pay or end."""

import zlib

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol.events import Sampling
from engine.runtime.answer import Answers
from engine.runtime.drafter import Drafter
from engine.runtime.head_drafter import HeadDrafter
from tests import generated_model
from tests.runtime.fake_batch_runner import VOCAB, FakeBatchRunner
from tests.runtime.test_scheduler import Bench
from tests.thorough import rarely

STEP_S = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.8, 6: 1.8, 7: 1.8, 8: 1.8}  # by rows
DRAWN = Sampling(temperature=0.8, seed=4, min_p=0.05)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf", layers=1)
    return Answers(PromptEncoder(GGUF(path)), context_length=1000)


def repeats(tokens):
    """The most probable token follows from the last one, so a greedy text becomes a circle."""
    return np.random.default_rng(tokens[-1]).normal(size=VOCAB).astype(np.float32) * 9


def misleads(tokens):
    """The last tokens have nearly always been there, but what comes next is another one."""
    token = np.random.default_rng(zlib.crc32(np.array(tokens, np.int32))).integers(6)
    return np.eye(VOCAB, dtype=np.float32)[token]


class CheckingRunner(FakeBatchRunner):
    check_rows = (4, 8)

    def __init__(self, logits_after, clock):
        super().__init__()
        self._logits_after, self._clock, self.rows = logits_after, clock, []

    def _decode(self, rows, ahead):
        texts = [self._store(*row.inputs, row.position, row.sequence) for row in rows]
        self.rows.append(len(rows))
        self._clock[0] += STEP_S[len(rows)]
        self._logits = np.array([self._logits_after(text) for text in texts])
        return self._logits.argmax(1).astype(np.int32)


class AheadRunner(CheckingRunner):
    """Begins with the next step before the host has the tokens of this one, if it may; else it waits for the host."""

    def _decode(self, rows, ahead):
        known, self.ahead = self.ahead, {}
        if known.keys() != {*rows}:
            assert not known  # nobody asked for a step in vain
            self._clock[0] += 0.2
        chosen = super()._decode(rows, ahead)
        if ahead and ahead() is not None:
            pairs = zip(rows, chosen, strict=True)
            self.ahead = {r._replace(inputs=(int(t),), position=r.position + 1): None for r, t in pairs}
        return chosen


class DraftRunner(CheckingRunner):
    """A tenth of the time, and every fifth token is another one."""

    def _decode(self, rows, ahead):
        before = self._clock[0]
        chosen = super()._decode(rows, ahead)
        self._clock[0] = before + 0.1
        return chosen + (rows[0].position % 5 == 0)


@pytest.fixture
def ask(answers, monkeypatch):
    """Answers requests with guesses, or without, on a device that takes `STEP_S`; returns the bench."""

    def ask(logits_after, requests, checks=True, runner=CheckingRunner, drafts=False):
        clock = [0.0]
        monkeypatch.setattr("time.perf_counter", lambda: clock[0])
        drafter = Drafter(DraftRunner(logits_after, clock), VOCAB, 270) if drafts else None
        who = "draft" if drafts else "auto" if checks else "off"
        bench = Bench(answers, runner(logits_after, clock), speculate=who, drafter=drafter)
        for prompt, n, sampling in requests:
            bench.ask(prompt, n, sampling=sampling, logprobs=2 if sampling is DRAWN else 0)
        bench.run()
        bench.seconds = clock[0]
        return bench

    return ask


@pytest.mark.parametrize("runner", [CheckingRunner, AheadRunner])
def test_a_text_that_repeats_itself_takes_fewer_steps_and_stays_the_same(ask, runner):
    requests = [([1, 2, 3], 300, Sampling(temperature=0))]
    plain, checked = (ask(repeats, requests, checks, runner) for checks in (False, True))
    assert checked.reply(0) == plain.reply(0)
    assert plain.seconds > 2.5 * checked.seconds
    end = checked.ends[0]
    assert end.draft_n_accepted > 200 and end.draft_n_accepted > 0.8 * end.draft_n
    assert end.draft_gain == pytest.approx(plain.seconds / checked.seconds, rel=0.1)
    assert (plain.ends[0].draft_n, plain.ends[0].draft_gain, end.predicted_n) == (0, 0, 300)


@pytest.mark.parametrize("sampling", [DRAWN, Sampling(temperature=0, repeat_penalty=1.05)])
def test_drawn_tokens_and_their_probabilities_stay_the_same(ask, sampling):
    requests = [([i, 2, 3] * 9, 60 + 20 * i, sampling) for i in range(3)]
    plain, checked = ask(repeats, requests, checks=False), ask(repeats, requests)
    assert [checked.told(i) for i in range(3)] == [plain.told(i) for i in range(3)]
    assert any(rows > 3 for rows in checked.runner.rows)


def test_replies_share_the_rows_of_a_check(ask):
    requests = [([1, 2, 3 + i], 200, Sampling(temperature=0)) for i in range(3)]
    plain, checked = ask(repeats, requests, checks=False), ask(repeats, requests)
    assert [checked.reply(i) for i in range(3)] == [plain.reply(i) for i in range(3)]
    assert plain.seconds > 1.4 * checked.seconds
    assert all(end.draft_n_accepted > 0.5 * end.predicted_n for end in checked.ends.values())


@pytest.mark.parametrize("runner", [CheckingRunner, rarely(AheadRunner)])
def test_guesses_that_are_wrong_end(ask, runner):
    requests = [([1, 2, 3], 900, Sampling(temperature=0))]
    plain, checked = (ask(misleads, requests, checks, runner) for checks in (False, True))
    assert checked.reply(0) == plain.reply(0)
    assert checked.seconds < 1.02 * plain.seconds
    assert sum(rows > 1 for rows in checked.runner.rows[20:]) < 900 // 10


@pytest.mark.parametrize("runner", [CheckingRunner, rarely(AheadRunner)])
def test_a_draft_model_guesses_for_one_reply(ask, runner):
    """As far as its context goes; two replies, one after the other, of which the second begins like the first."""
    requests = [([1, 2, 3] * 30, 200, DRAWN), ([1, 2, 3] * 20, 8, Sampling(temperature=0))]
    plain, checked = (ask(misleads, requests, False, runner, drafts) for drafts in (False, True))
    assert [checked.reply(i) for i in range(2)] == [plain.reply(i) for i in range(2)]
    one = ask(misleads, [([1, 2, 3], 250, Sampling(temperature=0))], False, runner, drafts=True)
    assert one.ends[0].draft_n
    if runner is CheckingRunner:
        assert one.ends[0].draft_n_accepted > 0.4 * one.ends[0].draft_n
        assert one.ends[0].draft_gain > 1.2


class FakeHead:
    """A token takes a tenth of a step. It knows the next ones, or is always wrong. The stream of a token is the number
    of the next one."""

    places, rows, is_ready = 2000, 4, True

    def __init__(self, clock, knows):
        self._clock, self._knows = clock, knows

    def store(self, place, tokens, streams):
        assert len(tokens) == len(streams)

    def draft(self, place, tokens, streams, n):
        assert streams[:, 0].tolist() == tokens
        self._clock[0] += 0.1 * n
        text = [tokens[-1]]
        while len(text) <= n:
            text.append(int(repeats(text).argmax()) if self._knows else 99)
        return text[1:]


@pytest.mark.parametrize(
    ("runner", "knows"),
    [(CheckingRunner, True), (AheadRunner, False), rarely(CheckingRunner, False), rarely(AheadRunner, True)],
)
def test_a_draft_head_pays_or_ends(answers, monkeypatch, runner, knows):

    class Telling(runner):
        def _decode(self, rows, ahead):
            chosen = super()._decode(rows, ahead)
            self._told = chosen
            return chosen

        def streams(self, rows):
            return self._told[:rows, None].astype(np.float32)

        def hidden(self):
            return [np.zeros((n, 1), np.float32) for n in self._read]

        def _prefill(self, pieces, phase="prefill"):
            self._read = [len(piece.inputs) for piece in pieces if piece.want == "hidden"]
            super()._prefill([piece._replace(want="none") for piece in pieces], phase)

    def run(speculate):
        clock = [0.0]
        monkeypatch.setattr("time.perf_counter", lambda: clock[0])
        drafter = HeadDrafter(FakeHead(clock, knows), VOCAB) if speculate == "heads" else None
        bench = Bench(answers, Telling(repeats, clock), speculate=speculate, drafter=drafter)
        bench.ask([1, 2, 3] * 20, 600)
        bench.run()
        return bench, clock[0]

    (plain, plain_s), (drafted, drafted_s) = run("off"), run("heads")
    assert plain.reply(0) == drafted.reply(0)
    end = drafted.ends[0]
    if knows:
        assert end.draft_n_accepted > 100 and drafted_s < plain_s
    else:
        assert end.draft_n and drafted_s < 1.03 * plain_s


@pytest.mark.parametrize("n", [101, 102, 103, 104, 105])
def test_no_token_comes_after_the_last_one(ask, n):
    end = ask(repeats, [([1, 2, 3], n, Sampling(temperature=0))])
    assert len(end.reply(0)) == end.ends[0].predicted_n == n and end.ends[0].reason == "length"
