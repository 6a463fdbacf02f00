"""Compiles what steps lack while requests come without a pause.

Kernels are compiled while the engine is idle. A server that is busy from its first start on would never be: it would
read prompts in its smallest steps for ever. So between its steps it compiles some in short slices, while half of the
CPUs do most of the work beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import PreemptedError
from engine.kernels.compilation import in_slices

BUSY_S = 5.0
"""A reply in a chat is seldom longer, and would be slower. A server that answers several conversations for so long is
taken to go on."""
SHARE = 0.2
"""Of the time, for compiling."""
SLICE_S = 0.05
"""What is at work on a kernel's graph then, or captures a step, goes on to its end: that may take 0.3 s."""


class BusyPreparation:
    """`steps`: each compiles kernels, and is called again if it raised PreemptedError."""

    def __init__(self, steps: Iterable[Callable[[], None]]) -> None:
        self._steps = deque(steps)
        self._due_s = 0.0

    def turn(self, conversations: int) -> None:
        """To be called between steps of so many conversations, often. Takes about as long as a slice."""
        started_s = time.monotonic()
        if conversations < 2:
            self._due_s = started_s + BUSY_S
        elif self._steps and started_s >= self._due_s:
            try:
                with in_slices(SLICE_S):
                    self._steps[0]()
                self._steps.popleft()
            except PreemptedError:
                pass
            ended_s = time.monotonic()
            self._due_s = ended_s + (ended_s - started_s) * (1 / SHARE - 1)
