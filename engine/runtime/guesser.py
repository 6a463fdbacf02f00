"""The guesses of one reply, and how good they were."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from engine.runtime.lookup import DRAFTED, NO_GUESS, Guess, Lookup

_MATCHES = (3, 5, 9, 17, DRAFTED)
"""Guesses are judged together whose matches have at least so many tokens, and fewer than the next number."""
DRAFT_SHARE = 0.8
_WEIGHTS = (2.0, 2.0, 2.0, 2.0, 4.0)  # how many guesses `_RIGHT` counts as
_RIGHT = (0.3, 0.5, 0.7, 0.9, DRAFT_SHARE)  # the share of right guesses until more is known
_MEMORY = 0.92  # what is left of the weight of earlier guesses with each one
_KEPT = 5  # times


class UsualTime:
    """What something takes as a rule: the median of the last times. The very first one is left out, as memory is mapped
    and graphs are uploaded then: on a GPU it may be forty times as long."""

    def __init__(self) -> None:
        self._times, self._has_begun = deque[float](maxlen=_KEPT), False

    def measured(self, seconds: float) -> None:
        if self._has_begun:
            self._times.append(seconds)
        self._has_begun = True

    @property
    def seconds(self) -> float:
        """0 if that is not known."""
        return statistics.median_low(self._times) if self._times else 0.0


class StepTimes:
    """What steps without prompts take, by their rows and by whether they check guesses."""

    def __init__(self) -> None:
        self._times = defaultdict[tuple[int, bool], UsualTime](UsualTime)

    def measured(self, rows: int, seconds: float, checks: bool = False) -> None:
        self._times[rows, checks].measured(seconds)

    def seconds(self, rows: int, checks: bool = False) -> float:
        """0 if that is not known."""
        return self._times[rows, checks].seconds


class DraftTimes:
    """What guesses of a drafter take, by their tokens: a part is for each token, and a part for each guess."""

    def __init__(self) -> None:
        self._times = defaultdict[int, UsualTime](UsualTime)

    def drafted(self, seconds: float, tokens: int) -> None:
        if tokens:
            self._times[tokens].measured(seconds)

    def draft_s(self, tokens: int) -> float:
        """Seconds of a guess of so many tokens: as measured, or on a line through what fewer and more of them took. 0
        if nothing is known."""
        known = {n: time.seconds for n, time in self._times.items() if time.seconds}
        if tokens in known or not known:
            return known.get(tokens, 0.0)
        few, many = min(known), max(known)
        if few == many:
            return known[many] * tokens / many
        slope_s = max(0.0, (known[many] - known[few]) / (many - few))
        return max(known[few] + slope_s * (tokens - few), slope_s * tokens)


class Guesser:
    """Guesses the next tokens of a reply."""

    def __init__(self) -> None:
        self._lookup = Lookup()
        self._tried = list(_WEIGHTS)
        self._right = [share * weight for share, weight in zip(_RIGHT, _WEIGHTS, strict=True)]

    def look_up(self, text: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow `text`, from what followed before."""
        return self._lookup.guess(text, most) if most > 0 else NO_GUESS

    def share(self, guess: Guess) -> float:
        """The probability that a token of a guess is right if those before it are."""
        i = _place(guess.match)
        return self._right[i] / self._tried[i]

    def checked(self, guess: Guess, right: int) -> None:
        """A guess was compared with the text, of which the first `right` tokens were right."""
        i = _place(guess.match)
        self._tried[i] = self._tried[i] * _MEMORY + right + (right < len(guess.tokens))
        self._right[i] = self._right[i] * _MEMORY + right


def _place(match: int) -> int:
    return max(i for i, least in enumerate(_MATCHES) if least <= match or not i)
