"""What a step of tensor graphs gets: tokens, and where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from tinygrad import Tensor, UOp

from engine.runtime.kv_blocks import BLOCK


class Step(NamedTuple):
    """The inputs of a captured step of n tokens, which are those of a sequence at `position` and after it.

    Of these the first `used` count: what follows only fills the step. It is not stored, and leaves recurrent states as
    they are. As they may lie in two blocks, keys and values are stored in two parts: those of the first `head` tokens
    at `place` of the cache and after it, and those of `tail_rows` from the token `tail` on at `tail_place`. All may be
    in the first; then the tail is the last of them once more. A step of one token has no tail (0 rows)."""

    tokens: Tensor
    """int32 (n,)"""
    rows: Tensor
    """See `Transformer.rows_of`."""
    places: Tensor
    """Where in the cache each token of the sequence lies: int32 (positions,)."""
    position: UOp
    sequence: UOp
    place: UOp
    used: UOp | int = 1
    head: UOp | int = 1
    tail: UOp | int = 0
    tail_rows: UOp | int = 0
    tail_place: UOp | int = 0
    of_pictures: Tensor | None = None
    """The embeddings of pictures, zeros where a token is none, float32 (n, `ModelSpec.picture_width`), if prompts may
    have some."""
    cos: Tensor | None = None
    """Of rotary embeddings with three positions, cosines and sines of the tokens, float32 (n, pairs) each."""
    sin: Tensor | None = None
    seen: Tensor | None = None
    """In steps that may have a whole picture, how many tokens each token sees, int32 (n,), and which of the step's
    tokens lies at each place of the cache, int32 (places,), -1 for none: so they lie in any number of blocks."""
    owners: Tensor | None = None


class StepInputs:
    """Makes steps for `sequences` of up to `length` tokens each, those that fill a step included, whose keys and values
    lie in `blocks`."""

    def __init__(self, sequences: int, length: int, blocks: int) -> None:
        self._n_places = blocks * BLOCK
        self._tables = np.zeros((sequences, ceil(length / BLOCK)), np.int32)
        self._places: dict[int, Tensor] = {}
        self._position = UOp.variable("position", 0, length - 1)
        self._sequence = UOp.variable("sequence", 0, sequences - 1)
        self._place, self._tail_place = (
            UOp.variable(name, 0, blocks * BLOCK - 1) for name in ("place", "tail_place")
        )
        self._tail = UOp.variable("tail", 0, BLOCK - 1)
        self._used, self._head, self._tail_rows = (
            UOp.variable(name, 1, BLOCK) for name in ("used", "head", "tail_rows")
        )

    def assign(self, sequence: int, table: Sequence[int]) -> None:
        """Sets the blocks of a sequence (`BlockStore.assign`)."""
        self._tables[sequence] = 0
        self._tables[sequence, : len(table)] = table
        self._places.pop(sequence, None)

    def step(self, tokens: Sequence[int], rows: Tensor, sequence: int, position: int, used: int) -> Step:
        """A step of these tokens, of which the first `used` count. `rows`: see `Step`."""
        n = len(tokens)
        if sequence not in self._places:
            places = self._tables[sequence][:, None] * BLOCK + np.arange(BLOCK, dtype=np.int32)
            self._places[sequence] = Tensor(places.ravel()).realize()
        step = Step(
            Tensor(np.asarray(tokens, np.int32)).realize(),
            rows,
            self._places[sequence],
            self._position.bind(position),
            self._sequence.bind(sequence),
            self._place.bind(self._place_of(sequence, position)),
        )
        if n == 1:
            return step
        if n > BLOCK:
            owners = np.full(self._n_places, -1, np.int32)
            owners[[self._place_of(sequence, position + i) for i in range(used)]] = range(used)
            return step._replace(owners=Tensor(owners).realize())
        head = min(used, BLOCK - position % BLOCK)
        tail = min(head, used - 1)
        return step._replace(
            used=self._used.bind(used),
            head=self._head.bind(head),
            tail=self._tail.bind(tail),
            tail_rows=self._tail_rows.bind(used - tail),
            tail_place=self._tail_place.bind(self._place_of(sequence, position + tail)),
        )

    def _place_of(self, sequence: int, position: int) -> int:
        return int(self._tables[sequence, position // BLOCK]) * BLOCK + position % BLOCK
