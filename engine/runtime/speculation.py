"""Guess and check: which tokens a step checks beside the last ones of replies.

A step takes the last token of a reply and guesses of what follows. The token after each of them is chosen as always; a
guess that is just the token chosen saves a step. So the text is the same as without guesses, drawn tokens included:
the draw of a token depends on its logits and its place alone.

A guess has to pay: a step of more rows takes longer. What steps take is measured, and so is how many of the guesses
were right, by the length of the match that they come from (`lookup`): also of those that are not checked, when the next
token comes. So text that misleads costs nothing. Where checks take too long, one is made only now and then, to measure
that again.
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
_UNMEASURED = 2**0.5
"""A check is taken to last so many plain steps until it is measured, or when it is to be measured again,"""
_PROBE_EVERY, _PROBE_SELDOM = 64, 4096
"""after so many steps that might have been checks: twice as many each time, up to the second number, until one pays."""


class Check(NamedTuple):
    """A step of so many `rows` checks `guesses` of the next tokens of replies, by their places; 0: it checks none.
    `others` are guesses that it does not check."""

    guesses: dict[int, Guess]
    rows: int
    others: dict[int, Guess]

    def of(self, place: int) -> tuple[int, ...]:
        """The guesses of a reply."""
        guess = self.guesses.get(place)
        return guess.tokens if guess else ()


NO_CHECK = Check({}, 0, {})


class _Found(NamedTuple):
    place: int
    guesser: Guesser
    guess: Guess


class Speculation:
    """Decides which guesses a step checks. `check_rows` and `can_check` are those of the runner."""

    def __init__(self, check_rows: Sequence[int], can_check: Callable[[int], bool]) -> None:
        self._check_rows, self._can_check = check_rows, can_check
        self.times = StepTimes()
        # whether the runner may have launched this step before, or the next one, and whether it ever does
        self._was_ahead = self._is_ahead = self._runs_ahead = False
        self._idle, self._probe_after = 0, _PROBE_EVERY

    def begin(self, replies: Sequence[tuple[int, Job]], blocks: KVBlocks) -> tuple[Check, bool]:
        """What a step of these replies, with their sequences, checks; and whether the next step may be launched ahead
        of it. A step that is ahead has no guesses, so with some to be checked, none is launched after it. Makes room
        for what is checked, if nobody has to be paused for that."""
        check, self._was_ahead, self._is_ahead = self.plan([job for _, job in replies]), self._is_ahead, False
        try:
            for place in check.guesses:
                blocks.reserve(replies[place][0], 1 + len(check.of(place)))
        except PoolFullError:
            return NO_CHECK, True
        if self._was_ahead:
            return Check({}, 0, {**check.guesses, **check.others}), not check.rows
        return check, not check.rows

    def goes_ahead(self) -> None:
        """The next step may be launched ahead."""
        self._is_ahead = self._runs_ahead = True

    def measured(self, check: Check, rows: int, seconds: float) -> float:
        """What a step took that had no prompts. Returns what one takes that checks nothing, 0 if that is not known."""
        if check.rows:
            self.times.measured(check.rows, seconds, checks=True)
            self._idle = 0
        elif self._was_ahead == self._runs_ahead:
            self.times.measured(rows, seconds)
        return self.times.seconds(rows)

    def plan(self, replies: Sequence[Job]) -> Check:
        """What a step of these replies checks beside their last tokens, if that pays or has to be measured again."""
        found = self._guesses(replies)
        widths = [n for n in self._check_rows if found and n > len(replies) and self._can_check(n)]
        if not widths or not self.times.seconds(len(replies)):
            return Check({}, 0, {f.place: f.guess for f in found})
        check, gain = self._best(found, widths, len(replies), lambda known_s, optimistic_s: known_s)
        if gain > WORTH:
            self._probe_after = _PROBE_EVERY
            return check
        self._idle += 1
        if self._idle >= self._probe_after:
            check, gain = self._best(found, widths, len(replies), min)
            if gain > WORTH:
                self._probe_after = min(2 * self._probe_after, _PROBE_SELDOM)
                return check
        return Check({}, 0, {f.place: f.guess for f in found})

    def _best(
        self, found: Sequence[_Found], widths: Sequence[int], rows: int, last: Callable[[float, float], float]
    ) -> tuple[Check, float]:
        """The check of the widths that promises most, and how many times the rate of a plain step. `last`: how long
        one lasts, from what is known of that and from what is hoped for."""
        best, best_gain, plain_s = NO_CHECK, 0.0, self.times.seconds(rows)
        for width in widths:
            lengths, right = _shared_out(found, width - rows)
            hoped_s = plain_s * _UNMEASURED
            check_s = last(self.times.seconds(width, checks=True) or hoped_s, hoped_s)
            if (gain := (rows + right) / rows * plain_s / check_s) > best_gain:
                parts = list(zip(found, lengths, strict=True))
                guesses = {f.place: f.guess.first(n) for f, n in parts if n}
                best = Check(guesses, width, {f.place: f.guess for f, n in parts if not n})
                best_gain = gain
        return best, best_gain

    def _guesses(self, replies: Sequence[Job]) -> list[_Found]:
        """Those of the replies that have any."""
        room = self._check_rows[-1] - len(replies) if self._check_rows else 0
        found = []
        for place, job in enumerate(replies if room > 0 else ()):
            if (guesser := job.guesser) and job.may_check:
                text = job.answer.tokens
                if (guess := guesser.guess(text, min(room, job.answer.left - 1))).tokens:
                    found.append(_Found(place, guesser, guess))
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
