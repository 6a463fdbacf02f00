"""Guess and check: which tokens a step checks beside the last ones of replies.

A step takes the last token of a reply and guesses of what follows. The token after each of them is chosen as always; a
guess that is just the token chosen saves a step. So the text is the same as without guesses, drawn tokens included:
the draw of a token depends on its logits and its place alone.

A guess has to pay: a step of more rows takes longer. What steps take is measured, and so is how many of the guesses
were right, by the length of the match that they come from (`lookup`). Where guesses do not pay, they are tried again
only now and then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.runtime.guesser import Guesser, StepTimes
from engine.runtime.jobs import Job
from engine.runtime.kv_blocks import KVBlocks, PoolFullError
from engine.runtime.lookup import Guess

WORTH = 1.05
"""A check has to promise so many times the rate of a plain step."""


class Check(NamedTuple):
    """A step of so many `rows` checks `guesses` of the next tokens of replies, by their places."""

    guesses: dict[int, Guess]
    rows: int

    def of(self, place: int) -> tuple[int, ...]:
        """The guesses of a reply."""
        guess = self.guesses.get(place)
        return guess.tokens if guess else ()


NO_CHECK = Check({}, 0)


class _Found(NamedTuple):
    place: int
    guesser: Guesser
    guess: Guess
    is_due: bool


class Speculation:
    """Decides which guesses a step checks. `check_rows` and `can_check` are those of the runner."""

    def __init__(self, check_rows: Sequence[int], can_check: Callable[[int], bool]) -> None:
        self._check_rows, self._can_check = check_rows, can_check
        self.times = StepTimes()
        # whether the runner may have launched this step before, or the next one, and whether it ever does
        self._was_ahead = self._is_ahead = self._runs_ahead = False

    def begin(self, replies: Sequence[tuple[int, Job]], blocks: KVBlocks) -> tuple[Check, bool]:
        """What a step of these replies, with their sequences, checks; and whether the next step may be launched ahead
        of it. A step that is ahead has no guesses, so with some to be checked, none is launched after it. Makes room
        for what is checked, if nobody has to be paused for that."""
        check, self._was_ahead, self._is_ahead = self.plan([job for _, job in replies]), self._is_ahead, False
        try:
            for place in check.guesses:
                blocks.reserve(replies[place][0], 1 + len(check.of(place)))
        except PoolFullError:
            check = NO_CHECK
        return NO_CHECK if self._was_ahead else check, not check.rows

    def goes_ahead(self) -> None:
        """The next step may be launched ahead."""
        self._is_ahead = self._runs_ahead = True

    def measured(self, check: Check, rows: int, seconds: float) -> float:
        """What a step took that had no prompts. Returns what one takes that checks nothing, 0 if that is not known."""
        if check.rows:
            self.times.measured(check.rows, seconds, checks=True)
        elif self._was_ahead == self._runs_ahead:
            self.times.measured(rows, seconds)
        return self.times.seconds(rows)

    def plan(self, replies: Sequence[Job]) -> Check:
        """What a step of these replies checks beside their last tokens, if that pays or has to be tried."""
        rows = len(replies)
        found = self._guesses(replies)
        widths = [n for n in self._check_rows if found and n > rows and self._can_check(n)]
        plain_s = self.times.seconds(rows)
        if not widths or not plain_s:
            return NO_CHECK
        best, best_gain = NO_CHECK, 0.0 if any(f.is_due for f in found) else WORTH
        for width in widths:
            lengths, right = _shared_out(found, width - rows)
            check_s = self.times.seconds(width, checks=True) or plain_s * 2**0.5  # not measured yet
            if (gain := (rows + right) / rows * plain_s / check_s) > best_gain:
                guesses = {f.place: f.guess.first(n) for f, n in zip(found, lengths, strict=True) if n}
                best, best_gain = Check(guesses, width), gain
        return best

    def _guesses(self, replies: Sequence[Job]) -> list[_Found]:
        """Those of the replies that have any."""
        room = self._check_rows[-1] - len(replies) if self._check_rows else 0
        found = []
        for place, job in enumerate(replies if room > 0 else ()):
            if (guesser := job.guesser) and job.may_check:
                text = job.answer.tokens
                if (guess := guesser.guess(text, min(room, job.answer.left - 1))).tokens:
                    found.append(_Found(place, guesser, guess, guesser.is_due(text)))
        return found


def _shared_out(found: Sequence[_Found], room: int) -> tuple[list[int], float]:
    """How many tokens of each guess are checked if there is room for so many in all, and how many of these are going to
    be right: those that are most probably so."""
    lengths, expected = [0] * len(found), 0.0
    shares = [f.guesser.share(f.guess) for f in found]
    likely = [(-share, i) for i, share in enumerate(shares)]
    heapq.heapify(likely)
    while room and likely:
        probability, i = heapq.heappop(likely)
        lengths[i] += 1
        room -= 1
        expected -= probability
        if lengths[i] < len(found[i].guess.tokens):
            heapq.heappush(likely, (probability * shares[i], i))
    return lengths, expected
