"""How much of a prompt goes before a decode step of other conversations.

Prompts and replies share the device. A long piece of a prompt delays the next token of every reply; a short one is read
inefficiently, since each piece reads all weights. So a piece may take SHARE times as long as the decode step after it:
the time between two tokens grows to some 2.2 times what it is without prompts, and prompts get half of the device.
"""

from __future__ import annotations

import statistics
from collections import deque

SHARE = 1.2
"""The most time of a piece, in decode steps."""
NEARLY_FREE = 1.15
"""A piece that takes so much longer than the shortest one costs replies little, and saves pieces."""
STEP_EVERY = 16
"""After so many rounds with a piece, one goes without, to measure the decode step."""
AGAIN_AFTER = 250
"""After so many rounds, a length that took too long is tried again."""
CHANGED = 1.5
"""If the decode step takes so much longer or shorter than before, other replies are decoded: all is measured anew."""
_SHORTEST = 16
_KEPT = 5  # times of a length


class Pace:
    """Chooses the length of the next piece, by what earlier ones took. A round is a piece of a prompt, or none, and a
    decode step after it."""

    def __init__(self, chunk_sizes: tuple[int, ...], max_chunk: int) -> None:
        """`chunk_sizes`, `max_chunk`: those of the runner."""
        shortest = max(_SHORTEST, chunk_sizes[0])
        doubled = (shortest << i for i in range(max_chunk.bit_length()))
        self._sizes = [size for size in doubled if size <= max_chunk] or [max_chunk]
        self._steps: deque[float] = deque(maxlen=3)  # seconds of rounds without a piece
        self._pieces: dict[int, deque[float]] = {}
        """By how many seconds rounds were longer, by the number of the size of the piece."""
        self._used: dict[int, int] = {}  # the round of the last piece of a size
        self._now = 0  # the size
        self._rounds, self._last_step = 0, 0
        self._basis_s = 0.0  # the decode step when pieces began to be measured

    @property
    def _step_s(self) -> float:
        """The decode step alone; 0 if it is not known."""
        return statistics.median(self._steps or [0.0])

    def piece(self) -> int:
        """The most tokens that should go before the next decode step; 0 when the step alone has to be measured. It
        changes by one size at a time, so that an old measurement does little harm."""
        if not self._steps or self._rounds - self._last_step > STEP_EVERY:
            return 0
        limit = max(SHARE * self._step_s, NEARLY_FREE * self._seconds(0))
        if self._seconds(self._now) > limit:
            self._now = max(0, self._now - 1)
        elif self._now in self._pieces and self._may_be_longer(limit):
            self._now += 1
        return self._sizes[self._now]

    def _may_be_longer(self, limit: float) -> bool:
        """Whether the next longer piece takes less than `limit`, or has to be tried."""
        longer = self._now + 1
        if longer == len(self._sizes):
            return False
        return self._seconds(longer) <= limit or self._rounds - self._used[longer] >= AGAIN_AFTER

    def measured(self, tokens: int, seconds: float) -> None:
        """A round with a piece of `tokens` tokens took `seconds`."""
        self._rounds += 1
        if not tokens:
            self._steps.append(seconds)
            self._last_step = self._rounds
            if not self._basis_s / CHANGED < self._step_s < self._basis_s * CHANGED:
                self._basis_s = self._step_s
                self._pieces.clear()
        elif self._steps:
            size = next((i for i, size in enumerate(self._sizes) if tokens <= size), len(self._sizes) - 1)
            if self._rounds - self._used.get(size, self._rounds) >= AGAIN_AFTER:
                self._pieces.pop(size, None)  # too old
            times = self._pieces.setdefault(size, deque(maxlen=_KEPT))
            times.append(max(0.0, seconds - self._step_s))
            self._used[size] = self._rounds

    def _seconds(self, size: int) -> float:
        """What a piece of the size with that number takes; 0 if that is not known."""
        return statistics.median_low(self._pieces.get(size, [0.0]))
