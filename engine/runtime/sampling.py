"""Sampling a token from logits on the host.

The steps and their order are those of llama.cpp's default chain (common/sampling.cpp): penalties for repetition,
top-k, top-p, min-p, temperature, then a random choice. NVIDIA GPUs do the same in
`engine.targets.nvidia.kernels.sampling.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, Philox, SeedSequence  # numpy imports these when they are asked for: 10 ms
from numpy.typing import NDArray

from engine.protocol.events import Sampling, TopToken

Logits = NDArray[np.float32]
LogProbabilities = tuple[float, tuple[TopToken, ...]]
"""The log-probability of the token that was chosen, and the most probable tokens, highest first."""
_BLOCK = 128  # logits


class Sampler:
    """Samples tokens with the given settings. The same seed and logits give the same tokens. `seed` is the one in
    use: that of `sampling`, else a random one."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.seed = sampling.seed if sampling.seed is not None else int(SeedSequence().generate_state(1)[0])
        self._random = Generator(Philox(self.seed))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken, so the host does not need the logits."""
        return self.sampling.temperature == 0 and not penalizes(self.sampling)

    def sample(self, logits: Logits, previous: Sequence[int]) -> int:
        """A token id. `logits`: float32 (vocab,); `previous`: all tokens so far, oldest first."""
        if self.sampling.temperature == 0:
            return int(self._penalized(logits, previous).argmax())
        ids, masses = self.candidates(logits, previous)
        cumulative = np.cumsum(masses)
        index = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(ids[min(index, ids.size - 1)])

    def uniforms(self, n: int) -> NDArray[np.float64]:
        """The uniform numbers in [0, 1) that the first `n` calls of `sample` use, float64 (n,), for sampling on the
        device. The token is the first one at which the cumulative probability, most probable first, exceeds it."""
        return Generator(Philox(self.seed)).random(n)

    def candidates(
        self, logits: Logits, previous: Sequence[int]
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The ids that top-k, top-p and min-p leave, and masses proportional to their probabilities, both (n,): most
        probable first, equal ones by id. The temperature must not be 0."""
        s, logits = self.sampling, self._penalized(logits, previous)
        ids = _top_k(logits, s.top_k) if 0 < s.top_k < logits.size else np.arange(logits.size)
        x = logits[ids].astype(np.float64)
        x -= x.max()
        total = np.exp(x).sum()
        if s.min_p > 0:  # before top-p, so that fewer tokens are sorted
            likely = x >= np.log(s.min_p)
            ids, x = ids[likely], x[likely]
        order = np.argsort(-x, kind="stable")
        ids, x = ids[order], x[order]
        if s.top_p < 1:  # the fewest tokens whose probabilities add up to top_p
            keep = int(np.searchsorted(np.cumsum(np.exp(x)), s.top_p * total)) + 1
            ids, x = ids[:keep], x[:keep]
        return ids, np.exp(x / s.temperature)

    def _penalized(self, logits: Logits, previous: Sequence[int]) -> Logits:
        s = self.sampling
        if not penalizes(s):
            return logits
        logits = logits.copy()
        last = np.asarray(previous[-s.repeat_last_n :], np.int64)
        last = last[last >= 0]  # not of pictures
        recent, counts = np.unique(last, return_counts=True)
        x = logits[recent]
        x = np.where(x > 0, x / s.repeat_penalty, x * s.repeat_penalty)
        logits[recent] = x - counts * s.frequency_penalty - s.presence_penalty
        return logits


class Bias:
    """Numbers for the logits of some tokens, added before all else, as llama.cpp does. Unknown ids are ignored."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        values = dict(bias)
        self._ids = np.fromiter(values, np.int64, len(values))
        self._values = np.fromiter(values.values(), np.float32, len(values))

    def added_to(self, logits: Logits) -> Logits:
        """`logits`, float32 (vocab,), with these added; not a copy if there are none."""
        if not self._ids.size:
            return logits
        known, logits = self._ids < logits.size, logits.copy()
        logits[self._ids[known]] += self._values[known]
        return logits


def penalizes(sampling: Sampling) -> bool:
    """Whether the settings change the logits of tokens that were said."""
    s = sampling
    has_penalty = s.repeat_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    return has_penalty and s.repeat_last_n > 0


def _top_k(logits: Logits, k: int) -> NDArray[np.intp]:
    """The indices of the k largest, ascending; of equal ones the first. They all lie in the k blocks with the largest
    maxima, so only a small part of a large vocabulary is partitioned."""
    blocks = logits.size // _BLOCK
    ids = np.arange(logits.size)
    if blocks > 2 * k:
        maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(1)
        chosen = np.flatnonzero(maxima >= np.partition(maxima, -k)[-k])
        ids = (chosen[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)
        ids = np.concatenate([ids, np.arange(blocks * _BLOCK, logits.size)])
    x = logits[ids]
    kth = np.partition(x, -k)[-k]
    equal = np.flatnonzero(x == kth)[: k - np.count_nonzero(x > kth)]
    return np.sort(np.concatenate([ids[x > kth], ids[equal]]))


def log_probabilities(logits: Logits, chosen: int, n: int) -> LogProbabilities:
    """The natural log-probability of the token `chosen`, and the `n` most probable tokens, highest first. `logits`:
    float32 (vocab,), without penalties."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    top = np.argpartition(x, -n)[-n:] if n < x.size else np.arange(x.size)
    top = top[np.argsort(-x[top], kind="stable")]
    return float(x[chosen]), tuple(TopToken(id=int(i), logprob=float(x[i])) for i in top)
