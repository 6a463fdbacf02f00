"""The guesses of one reply, and how good they were."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from engine.runtime.lookup import NO_GUESS, Guess, Lookup

PROBE_EVERY = 64
"""After so many tokens without a check, one is made to see whether guesses are right again."""
_MATCHES = (3, 5, 9, 17)
"""Guesses are judged together whose matches have at least so many tokens, and fewer than the next number."""
_RIGHT = (0.3, 0.5, 0.7, 0.9)  # the share of right guesses until more is known
_MEMORY = 0.85  # what is left of the weight of earlier checks with each one
_KEPT = 5  # times of steps


class StepTimes:
    """What steps without prompts take, by their rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def measured(self, rows: int, seconds: float) -> None:
        self._seconds.setdefault(rows, deque(maxlen=_KEPT)).append(seconds)

    def seconds(self, rows: int) -> float:
        """0 if that is not known."""
        times = self._seconds.get(rows)
        return statistics.median(times) if times else 0.0


class Guesser:
    """Guesses the next tokens of a reply."""

    def __init__(self) -> None:
        self._lookup = Lookup()
        self._tried = [2.0] * len(_MATCHES)
        self._right = [2.0 * share for share in _RIGHT]
        self._last_check = 0  # the tokens of the text then
        self._match = 0  # of the guess that is being checked, its place in `_MATCHES`

    def guess(self, text: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow `text`."""
        return self._lookup.guess(text, most) if most > 0 else NO_GUESS

    def gain(self, guess: Guess, n: int, times: StepTimes, rows: int, check_rows: int) -> float:
        """How many times as fast the reply goes on, as far as is known, if a step of `rows` rows becomes one of
        `check_rows` that checks `n` tokens."""
        right = self._share(_place(guess.match))
        tokens = sum(right**i for i in range(n + 1))
        plain, check = times.seconds(rows), times.seconds(check_rows)
        return tokens * plain / check if plain and check else tokens / 2**0.5  # not measured yet

    def is_due(self, text: Sequence[int]) -> bool:
        """Whether a check should be made even if it promises nothing."""
        return len(text) - self._last_check >= PROBE_EVERY

    def checking(self, guess: Guess, text: Sequence[int]) -> None:
        """A step is about to check a guess."""
        self._match, self._last_check = _place(guess.match), len(text)

    def checked(self, right: int, n: int) -> None:
        """Of the last guess, `n` tokens were checked, and the first `right` were right."""
        i = self._match
        self._tried[i] = self._tried[i] * _MEMORY + right + (right < n)
        self._right[i] = self._right[i] * _MEMORY + right

    def _share(self, i: int) -> float:
        return self._right[i] / self._tried[i]


def _place(match: int) -> int:
    return max(i for i, least in enumerate(_MATCHES) if least <= match or not i)
