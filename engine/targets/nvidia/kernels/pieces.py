"""Which rows of a step are tokens of prompts.

A step takes pieces of several prompts, each in rows of its own, from a multiple of `PIECE_ROWS` on. After them there
may be rows of replies (`StepRows`), which may begin in the last piece's unit. Its state is int32 (3 + 4 * units,): the
number of rows up to the last one that is used, the first row of replies, their number, and for each `PIECE_ROWS` rows,
a unit, the piece that they belong to: the position of its first token, its number of tokens, its sequence, and its
first row. A unit without a piece has no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp

from engine.targets.nvidia.kernels.uops import load_index

PIECE_ROWS = 32
MAX_POSITION = 1 << 30  # of a token in any sequence
_HEAD, _FIELDS = 3, 4


@dataclass(frozen=True)
class Piece:
    """The piece that a row belongs to, in a kernel: `count` tokens from `position` on, in rows from `first` on. The
    state has the sequence at index `sequence_at`."""

    position: UOp
    count: UOp
    first: UOp
    sequence_at: UOp | int

    @staticmethod
    def of(state: UOp, row: UOp | int, tokens: int, length: int) -> Piece:
        """The piece of a row of a step of so many tokens, of sequences shorter than `length`."""
        unit = row // PIECE_ROWS * _FIELDS + _HEAD
        position, count, first = (
            load_index(state, unit + i, limit) for i, limit in ((0, length), (1, tokens + 1), (3, tokens))
        )
        return Piece(position, count, first, unit + 2)

    def token(self, row: UOp) -> UOp:
        """Which of the piece's tokens a row has; it is one if it is below `count`."""
        return (row - self.first).maximum(0)


def used_rows(state: UOp, tokens: int) -> UOp:
    """The rows of a step up to the last one that is used."""
    return load_index(state, 0, tokens + 1)


def is_used(state: UOp, row: UOp, tokens: int) -> UOp:
    """Whether a row has a token, of a reply or of a prompt."""
    piece = Piece.of(state, row, tokens, 1)
    first, replies = (load_index(state, i, tokens + 1) for i in (1, 2))
    return (row >= first) & (row < first + replies) | (piece.token(row) < piece.count)


def state_size(tokens: int) -> int:
    """Numbers of the state of a step of up to so many tokens."""
    return _HEAD + -(-tokens // PIECE_ROWS) * _FIELDS


def state_of(
    tokens: int, pieces: Iterable[tuple[int, int, int, int]], replies: int = 0, first_reply: int = 0
) -> NDArray[np.int32]:
    """The state of a step, of each piece's first row, position, number of tokens and sequence."""
    state = np.zeros(state_size(tokens), np.int32)
    units = state[_HEAD:].reshape(-1, _FIELDS)
    state[:_HEAD] = first_reply + replies, first_reply, replies
    for first, position, count, sequence in pieces:
        units[first // PIECE_ROWS : -(-(first + count) // PIECE_ROWS)] = position, count, sequence, first
        state[0] = max(state[0], first + count)
    return state


def rows_of(count: int, unit: int = PIECE_ROWS) -> int:
    """The rows that a piece of so many tokens takes, if pieces begin at multiples of `unit`."""
    return -(-count // unit) * unit
