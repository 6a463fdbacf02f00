"""What is drawn where guesses are checked has the distribution of what is drawn without them."""

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol.events import Sampling
from engine.runtime.answer import Answers
from engine.runtime.sampling import Sampler
from tests import generated_model
from tests.runtime.fake_batch_runner import VOCAB, FakeBatchRunner
from tests.runtime.test_scheduler import Bench
from tests.thorough import THOROUGH, rarely, thorough

DRAWS, REPLY = 100_000 if THOROUGH else 1600, 800
LOGITS = np.full(VOCAB, -9, np.float32)
LOGITS[[3, 50, 7, 90, 11, 5]] = [2, 1.8, 1.5, 1.1, 0.9, 0.2]


class SteadyRunner(FakeBatchRunner):
    """The logits are always the same, and checks cost nothing, so each guess is checked."""

    check_rows = (4, 8)

    def _decode(self, rows, ahead):
        self._logits = np.tile(LOGITS, (len(rows), 1))
        return np.full(len(rows), LOGITS.argmax(), np.int32)

    def _prefill(self, pieces, phase="prefill"):
        pass


def chi_square(counts, shares):
    """How far counts are from shares of their sum, in standard deviations of what that varies by."""
    expected = shares * counts.sum()
    used = expected > 0
    assert not counts[~used].any()
    chi = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return (chi - freedom) / np.sqrt(2 * freedom)


@thorough  # statistics of what test_texts_by_their_seeds has token by token
@pytest.mark.parametrize(
    "settings",
    [
        rarely({"temperature": 0.8, "min_p": 0.0}),
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.2},
    ],
)
def test_tokens_and_pairs_of_tokens(settings, tmp_path, monkeypatch):
    path = generated_model.write(tmp_path / "m.gguf", layers=1)
    answers = Answers(PromptEncoder(GGUF(path)), context_length=1000)
    clock = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    ids, masses = Sampler(Sampling(**settings)).candidates(LOGITS, [])
    shares = np.zeros(VOCAB)
    shares[ids] = masses / masses.sum()
    pairs, right = np.zeros((VOCAB, VOCAB)), 0
    for seed in range(DRAWS // REPLY):
        bench = Bench(answers, SteadyRunner(parallel=1), speculate="lookup")
        bench.ask([1, 2, 4], REPLY, sampling=Sampling(seed=seed, **settings))
        bench.run(10 * REPLY)
        text, end = bench.reply(0), bench.ends[0]
        np.add.at(pairs, (text[:-1], text[1:]), 1)
        right += end.draft_n_accepted
    assert right > DRAWS / 20
    assert chi_square(pairs.sum(0), shares) < 4
    assert chi_square(pairs.reshape(-1), np.outer(shares, shares).reshape(-1)) < 4


@thorough
def test_texts_by_their_seeds_are_the_same(tmp_path, monkeypatch):
    """With penalties, a token's probability depends on those before it."""
    path = generated_model.write(tmp_path / "m.gguf", layers=1)
    answers = Answers(PromptEncoder(GGUF(path)), context_length=1000)
    clock = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    settings = {"temperature": 1.1, "min_p": 0.0, "repeat_penalty": 1.2, "presence_penalty": 0.3}
    right = 0
    for seed in range(DRAWS // REPLY):
        texts = []
        for who in ("off", "lookup"):
            bench = Bench(answers, SteadyRunner(parallel=1), speculate=who)
            bench.ask([1, 2, 4], REPLY, sampling=Sampling(seed=seed, top_k=20, **settings))
            bench.run(10 * REPLY)
            texts.append(bench.reply(0))
        assert texts[0] == texts[1] and len(texts[0]) == REPLY
        right += bench.ends[0].draft_n_accepted
    assert right > DRAWS / 50
