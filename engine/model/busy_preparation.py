"""Compiles what steps lack while requests come without a pause.

Kernels are compiled while the engine is idle. A server that is busy from its first start on would never be: it would
read prompts in its smallest steps for ever. So compiler processes work beside it, and now and then its conversations
wait for a moment, in which these are given kernels, and what they have made is taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import PreemptedError
from engine.kernels import compilers
from engine.kernels.compilation import interruptible

BUSY_S = 5.0
"""A reply in a chat is seldom longer, and would be slower. A server that answers several conversations for so long is
taken to go on."""
SHARE = 0.2
"""Of the time, for this."""
SLICE_S = 0.02
"""Of a turn, which goes on to the end of what it is at: a sequence of kernels, which is put together, or a capture."""


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
                with interruptible(lambda: time.monotonic() - started_s >= SLICE_S, waits=False):
                    self._steps[0]()
                self._steps.popleft()
                if not self._steps:
                    compilers.end()
            except PreemptedError:
                pass
            ended_s = time.monotonic()
            self._due_s = ended_s + (ended_s - started_s) * (1 / SHARE - 1)
