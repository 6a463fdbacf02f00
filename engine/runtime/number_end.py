"""An end for the digits of numbers: JSON sets none, and a model may go on with them for ever."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.formats.tokenizer import Tokenizer

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
        if (allowed & self._quotes).any() or not (allowed & self._ends).any():
            return allowed
        return allowed & ~self._begins

    @cached_property
    def _quotes(self) -> NDArray[np.uint32]:
        return self._bits(lambda piece: piece == b'"')

    @cached_property
    def _ends(self) -> NDArray[np.uint32]:
        return self._bits(lambda piece: piece in _AFTER_NUMBERS)

    @cached_property
    def _begins(self) -> NDArray[np.uint32]:
        return self._bits(lambda piece: piece[:1].isdigit())

    def _bits(self, of: Callable[[bytes], bool]) -> NDArray[np.uint32]:
        n = self._tokenizer.vocab_size
        bits = np.zeros(-(-n // 32) * 32, bool)
        bits[:n] = [of(self._tokenizer.piece(id)) for id in range(n)]
        return np.packbits(bits, bitorder="little").view(np.uint32)
