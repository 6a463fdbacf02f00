"""How many tokens of prompts a step takes in beside the next tokens of replies.

Prompts and replies share a step. Many tokens of prompts delay the next token of every reply; few are read
inefficiently. So a step with prompts may take `bound` times as long as one without: that bounds the time between two
tokens, and what is left of the step is for prompts.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from engine.protocol.events import TOKEN_GAP

NEARLY_FREE = 1.15
"""A room that takes so much longer than the smallest one costs replies little, and saves steps."""
BURST_S, BURST_PASSES = 0.04, 4
"""While all replies wait, a step reads prompts for about so long, in at most so many passes over the weights: replies
have a part of each step, so with more steps the last prompt would wait longer."""
STEP_EVERY = 16
"""After so many steps with prompts, one goes without, to measure that."""
AGAIN_AFTER = 250
"""After so many steps, a room that took too long is tried again."""
CHANGED = 1.5
"""If a step without prompts takes so much longer or shorter than before, there are other replies. With more of them,
steps with prompts take so much longer too; with fewer, all is measured anew."""
_KEPT = 5  # times of a room


class Pace:
    """Chooses the room for prompts in the next step, by what earlier steps took."""

    def __init__(self, bound: float = TOKEN_GAP) -> None:
        self._bound = bound
        self._alone: deque[float] = deque(maxlen=3)  # seconds of steps without prompts
        self._times: dict[int, deque[float]] = {}
        """Seconds of steps with prompts, by their room."""
        self._used: dict[int, int] = {}  # the last step of a room
        self._passes: dict[int, float] = {}  # the last seconds of a room, whatever the replies
        self._nth = 0  # of the sizes: the room of the last step
        self._steps, self._last_alone = 0, 0
        self._basis_s = 0.0  # a step without prompts when rooms began to be measured

    @property
    def step_s(self) -> float:
        """Seconds of a step without prompts; 0 if that is not known."""
        return statistics.median(self._alone or [0.0])

    def room(self, sizes: Sequence[int]) -> int:
        """The most tokens of prompts for the next step, one of `sizes`, ascending; 0 when a step without prompts has to
        be measured. It changes by one size at a time, so that an old measurement does little harm."""
        self._nth = min(self._nth, len(sizes) - 1)
        if not self._alone or self._steps - self._last_alone > STEP_EVERY:
            return 0
        limit = max(self._bound * self.step_s, NEARLY_FREE * self._seconds(sizes[0]))
        if self._nth and self._seconds(sizes[self._nth]) > limit:
            self._nth -= 1
        elif len(self._times.get(sizes[self._nth], ())) > 1 and self._may_be_longer(sizes, limit):
            self._nth += 1
        return sizes[self._nth]

    def burst(self, size: int) -> int:
        """The most tokens of prompts for the next step while all replies wait: a multiple of `size`, the largest room
        of one pass over the weights."""
        seconds = self._passes.get(size)
        return size * max(1, min(BURST_PASSES, int(BURST_S / seconds))) if seconds else size

    def _may_be_longer(self, sizes: Sequence[int], limit: float) -> bool:
        """Whether the next larger room takes less than `limit`, or has to be tried."""
        if self._nth + 1 == len(sizes):
            return False
        larger = sizes[self._nth + 1]
        return self._seconds(larger) <= limit or self._steps - self._used[larger] >= AGAIN_AFTER

    def measured(self, room: int, seconds: float) -> None:
        """A step with room for so many tokens of prompts, or without any (0), took `seconds`."""
        self._steps += 1
        if not room:
            self._alone.append(seconds)
            self._last_alone = self._steps
            if not self._basis_s / CHANGED < self.step_s < self._basis_s * CHANGED:
                longer = self.step_s - self._basis_s
                known = self._times.items() if longer > 0 else ()
                self._times = {n: deque((s + longer for s in times), _KEPT) for n, times in known}
                self._basis_s = self.step_s
        else:
            if self._steps - self._used.get(room, self._steps) >= AGAIN_AFTER:
                self._times.pop(room, None)  # too old
            self._times.setdefault(room, deque(maxlen=_KEPT)).append(seconds)
            self._used[room] = self._steps
            self._passes[room] = seconds

    def _seconds(self, room: int) -> float:
        """What a step with that room takes if nothing delays it; 0 if that is not known."""
        return sorted(self._times.get(room, [0.0]))[:2][-1]
