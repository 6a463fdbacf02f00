"""An end for the digits of numbers: JSON sets none, and a model may go on with them for ever."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.formats.tokens.tokenizer import Tokenizer

MAX_DIGITS = 20
"""In a row. Integers of 64 bits have no more, and a double keeps 17."""
_DIGITS = b"0123456789"
_AFTER_NUMBERS = frozenset((b",", b"}", b"]", b")", b"<", b"\n"))  # in JSON, calls and tags


class DigitTokens:
    """The tokens of a vocabulary as they go on with a number. Their bits: as `Constraint.allowed` has them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def after(self, digits: int, token: int) -> int:
        """How many digits a text ends with that ended with so many before `token`."""
        piece = self._tokenizer.piece(token)
        others = len(piece.rstrip(_DIGITS))
        return len(piece) - others + (0 if others else digits)

    def without(self, allowed: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """What is `allowed`, uint32 (words,), without digits if these are those of a number, which may end here: in a
        text, a quotation mark may come next."""
        quotes, ends, begins = self._bits
        if (allowed & quotes).any() or not (allowed & ends).any():
            return allowed
        return allowed & ~begins

    @cached_property
    def _bits(self) -> tuple[NDArray[np.uint32], ...]:
        """Masks of tokens, a bit each: those that are a quotation mark, that may follow a number, that begin with a
        digit."""
        n, last = self._tokenizer.vocab_size, self._tokenizer.eos_ids
        bits = np.zeros((3, -(-n // 32) * 32), bool)
        pieces = list(map(self._tokenizer.piece, range(n)))
        bits[0, :n] = [piece == b'"' for piece in pieces]
        bits[1, :n] = [piece in _AFTER_NUMBERS or id in last for id, piece in enumerate(pieces)]
        bits[2, :n] = [piece[:1].isdigit() for piece in pieces]
        return tuple(np.packbits(bits, axis=1, bitorder="little").view(np.uint32))
