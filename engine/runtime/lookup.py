"""Prompt lookup: guesses the next tokens of a text from what followed its last tokens before.

Texts that are edited, quoted or continued repeat themselves, code most of all. The index takes one entry a token, and a
guess takes as long at 128k tokens as at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

KEY_TOKENS = 3
"""How many tokens have to be the same before a place in the text counts as a repetition."""
LONGEST_MATCH = 32
"""Matches are not counted any further."""
_SHIFT = 24  # bits that hold any token id


class Guess(NamedTuple):
    """The tokens that may come next, and how many tokens before them are the same as before the place they are from, or
    `DRAFTED`."""

    tokens: tuple[int, ...]
    match: int

    def first(self, n: int) -> Guess:
        """The first `n` tokens of it."""
        return self._replace(tokens=self.tokens[:n])


DRAFTED = LONGEST_MATCH + 1
"""In place of a match: the tokens are those of a draft model."""
NO_GUESS = Guess((), 0)


class Lookup:
    """An index of one text that grows. Only tokens that are certain belong to it."""

    def __init__(self) -> None:
        # where the tokens after some `KEY_TOKENS` tokens begin, the last time
        self._ends: dict[int, int] = {}
        self._indexed = KEY_TOKENS - 1  # the ends up to here are in it

    def guess(self, text: Sequence[int], n: int) -> Guess:
        """The `n` tokens that may follow `text`, which begins with that of the call before. A text that repeats a short
        piece is continued in this way."""
        for end in range(self._indexed + 1, len(text)):
            self._ends[_key(text, end)] = end
        self._indexed = max(self._indexed, len(text) - 1)
        if len(text) < KEY_TOKENS or not (place := self._ends.get(_key(text, len(text)))):
            return NO_GUESS
        period = len(text) - place
        tokens = tuple(takewhile(is_text, (text[place + i % period] for i in range(n))))
        return Guess(tokens, _same_before(text, place))


def is_text(token: int) -> bool:
    """Whether it is no part of a picture."""
    return token >= 0


def _key(text: Sequence[int], end: int) -> int:
    key = 0
    for token in text[end - KEY_TOKENS : end]:
        key = key << _SHIFT | token
    return key


def _same_before(text: Sequence[int], place: int) -> int:
    """How many tokens before a place are the same as those before the end of the text."""
    n = 0
    while n < min(place, LONGEST_MATCH) and text[place - 1 - n] == text[-1 - n]:
        n += 1
    return n
