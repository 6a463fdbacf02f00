"""Drawing a token from logits, on the host: the steps and their order are llama.cpp's default chain
(common/sampling.cpp): repetition penalty, top-k, top-p, min-p, temperature, draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.events import Sampling, TopToken

Logits = NDArray[np.float32]
_BLOCK = 128


class Sampler:
    """Draws tokens as `sampling` says; the same seed and logits give the same tokens. `seed` is the one used:
    drawn at random where `sampling` has none."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self.seed = (
            sampling.seed if sampling.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
        )
        self._random = np.random.Generator(np.random.Philox(self.seed))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken, so that logits need not leave the device."""
        return self._sampling.temperature == 0 and self._sampling.repeat_penalty == 1

    def draw(self, logits: Logits, previous: Sequence[int]) -> int:
        """A token id. `logits` float32 (vocab,); `previous` are the tokens so far, oldest first."""
        if self._sampling.temperature == 0:
            return int(self._penalized(logits, previous).argmax())
        ids, masses = self.kept(logits, previous)
        total = np.cumsum(masses)
        place = np.searchsorted(total, self._random.random() * total[-1], side="right")
        return int(ids[min(place, ids.size - 1)])

    def numbers(self, n: int) -> NDArray[np.float64]:
        """The numbers in [0, 1) that the first `n` draws take, for a device that draws in this one's place: the
        token whose share of all masses, most probable first, reaches beyond the number."""
        return np.random.Generator(np.random.Philox(self.seed)).random(n)

    def kept(self, logits: Logits, previous: Sequence[int]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The tokens that may be drawn, most probable first and of equals the lower id first, and masses that
        their probabilities are proportional to. The temperature is not 0."""
        s, logits = self._sampling, self._penalized(logits, previous)
        ids = _top(logits, s.top_k) if 0 < s.top_k < logits.size else np.arange(logits.size)
        x = logits[ids].astype(np.float64)
        x -= x.max()
        total = np.exp(x).sum()
        if s.min_p > 0:  # at least min_p times as probable as the first; here, since the rest need no sorting
            likely = x >= np.log(s.min_p)
            ids, x = ids[likely], x[likely]
        order = np.argsort(-x, kind="stable")
        ids, x = ids[order], x[order]
        if s.top_p < 1:  # the fewest tokens whose probabilities add up to top_p
            keep = int(np.searchsorted(np.cumsum(np.exp(x)), s.top_p * total)) + 1
            ids, x = ids[:keep], x[:keep]
        return ids, np.exp(x / s.temperature)

    def _penalized(self, logits: Logits, previous: Sequence[int]) -> Logits:
        s = self._sampling
        if s.repeat_penalty == 1 or not s.repeat_last_n:
            return logits
        logits = logits.copy()
        seen = np.unique(np.asarray(previous[-s.repeat_last_n :], np.int64))
        x = logits[seen]
        logits[seen] = np.where(x > 0, x / s.repeat_penalty, x * s.repeat_penalty)
        return logits


def _top(logits: Logits, k: int) -> NDArray[np.intp]:
    """The indices of the k largest, in their own order; of equal ones the first. They lie in the k blocks whose
    largest are the largest, which leaves little of a large vocabulary to be sorted."""
    blocks = logits.size // _BLOCK
    ids = np.arange(logits.size)
    if blocks > 2 * k:
        largest = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(1)
        chosen = np.flatnonzero(largest >= np.partition(largest, -k)[-k])
        ids = (chosen[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)
        ids = np.concatenate([ids, np.arange(blocks * _BLOCK, logits.size)])
    x = logits[ids]
    least = np.partition(x, -k)[-k]
    equal = np.flatnonzero(x == least)[: k - np.count_nonzero(x > least)]
    return np.sort(np.concatenate([ids[x > least], ids[equal]]))


def log_probabilities(logits: Logits, chosen: int, n: int) -> tuple[float, tuple[TopToken, ...]]:
    """The natural log-probability of `chosen`, and the `n` most probable tokens, highest first."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    top = np.argpartition(x, -n)[-n:] if n < x.size else np.arange(x.size)
    top = top[np.argsort(-x[top], kind="stable")]
    return float(x[chosen]), tuple(TopToken(id=int(i), logprob=float(x[i])) for i in top)
