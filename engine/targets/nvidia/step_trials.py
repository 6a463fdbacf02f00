"""Decode steps that a search runs: what they compute, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from tinygrad import Device, Tensor

from engine.runtime.sampling import Logits

_TOKENS = (1, 77, 5, 1203)  # arbitrary: the logits after them are compared
_TIMING_S = 0.012


class StepTrials:
    """Runs captured decode steps. `send` makes a token at a position the input of the next step, which leaves `logits`.
    A step may be run for `positions` positions."""

    def __init__(self, send: Callable[[int, int], None], logits: Tensor, positions: int, vocab: int) -> None:
        self._send, self._logits, self._positions, self._vocab = send, logits, positions, vocab

    def logits(self, run: Callable[[], None]) -> Logits:
        """The logits of a step after a few tokens, float32 (1, vocab)."""
        for position, token in enumerate(_TOKENS[: self._positions]):
            self._send(token % self._vocab, position)
            run()
        return np.asarray(self._logits.numpy(), np.float32)

    def seconds(self, run: Callable[[], None]) -> float:
        """Seconds of a step: the best of three measurements of `_TIMING_S` each, after a first one that tells how many
        steps fit."""
        device, best = Device[Device.DEFAULT], float("inf")
        steps = 1
        for turn in range(4):
            self._send(1, 0)
            device.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                run()
            device.synchronize()
            seconds = (time.perf_counter() - started) / steps
            if turn:
                best = min(best, seconds)
            else:
                steps = max(1, min(self._positions - 1, int(_TIMING_S / seconds)))
        return best
