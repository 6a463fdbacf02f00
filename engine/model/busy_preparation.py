"""Compiles what steps lack while requests come without a pause.

Kernels are compiled while the engine is idle. A server that is busy from its first start on would never be: it would
read prompts in its smallest steps for ever. So now and then its conversations wait for some kernels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import PreemptedError
from engine.kernels.compilation import interruptible

BUSY_S = 5.0
"""A reply in a chat is seldom longer, and would stall. A server that answers several conversations for so long is
taken to go on."""
SHARE = 0.2
"""Of the time, for compiling."""


class BusyPreparation:
    """`steps`: each compiles kernels, and is called again if it raised PreemptedError."""

    def __init__(self, steps: Iterable[Callable[[], None]]) -> None:
        self._steps = deque(steps)
        self._due_s = 0.0

    def turn(self, conversations: int) -> None:
        """To be called between steps of so many conversations, often. May take as long as some kernels take to be
        compiled, several at once."""
        started_s = time.monotonic()
        if conversations < 2:
            self._due_s = started_s + BUSY_S
        elif self._steps and started_s >= self._due_s:
            try:
                with interruptible(lambda: True):
                    self._steps[0]()
                self._steps.popleft()
            except PreemptedError:
                pass
            ended_s = time.monotonic()
            self._due_s = ended_s + (ended_s - started_s) * (1 / SHARE - 1)
