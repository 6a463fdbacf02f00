"""Guess and check: which tokens a step checks beside the last one of a reply.

A step takes the last token of a reply and guesses of what follows. The token after each of them is chosen as always; a
guess that is just the token chosen saves a step. So the text is the same as without guesses, drawn tokens included:
the draw of a token depends on its logits and its place alone.

A guess has to pay: a step of more rows takes longer. What steps take is measured, and so is how many of the guesses
were right, by the length of the match that they come from (`lookup`). Where guesses do not pay, they are tried again
only now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.runtime.guesser import Guesser, StepTimes
from engine.runtime.jobs import Job
from engine.runtime.lookup import Guess

WORTH = 1.05
"""A check has to promise so many times the rate of a plain step."""


class Check(NamedTuple):
    """A step checks `tokens`, guesses of the next ones of the reply at `place`, and has so many `rows`."""

    place: int
    tokens: tuple[int, ...]
    rows: int


def guesses_at(check: Check | None, place: int) -> tuple[int, ...]:
    """Those of the reply at a place that a step checks."""
    return check.tokens if check and check.place == place else ()


class Speculation:
    """Decides which guesses a step checks. `check_rows` and `is_prepared` are those of the runner."""

    def __init__(self, check_rows: Sequence[int], is_prepared: Callable[[int], bool]) -> None:
        self._check_rows, self._is_prepared = check_rows, is_prepared
        self.times = StepTimes()

    def plan(self, replies: Sequence[Job]) -> Check | None:
        """What a step of these replies checks beside their last tokens, if that pays or has to be tried. One reply's
        guesses take all the room that there is."""
        rows = len(replies)
        guesses = self._guesses(replies)
        widths = [n for n in self._check_rows if guesses and n > rows and self._is_prepared(n)]
        if not widths or not self.times.seconds(rows):
            return None
        best, best_gain = None, WORTH
        for place, guesser, text, guess in guesses:
            least = 0.0 if guesser.is_due(text) else best_gain
            for width in widths:
                n = min(width - rows, len(guess.tokens))
                if (gain := guesser.gain(guess, n, self.times, rows, width)) > least:
                    best, best_gain, least = Check(place, guess.tokens[:n], width), max(gain, best_gain), gain
                    match = guess
        if best:
            checked = replies[best.place]
            assert checked.guesser
            checked.guesser.checking(match, checked.answer.tokens)
        return best

    def _guesses(self, replies: Sequence[Job]) -> list[tuple[int, Guesser, Sequence[int], Guess]]:
        """For each reply that has one its place, guesser, tokens, and guess."""
        room = self._check_rows[-1] - len(replies) if self._check_rows else 0
        found = list[tuple[int, Guesser, Sequence[int], Guess]]()
        for place, job in enumerate(replies if room > 0 else ()):
            if job.guesser and job.may_check:
                text = job.answer.tokens
                if (guess := job.guesser.guess(text, min(room, job.answer.left - 1))).tokens:
                    found.append((place, job.guesser, text, guess))
        return found
