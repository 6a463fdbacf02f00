"""The angles of sequences whose tokens have other positions than their places (`engine.runtime.pictures`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.kernels.device_memory import overwrite
from engine.runtime.model_runner import Slot
from engine.runtime.pictures import PictureRoom, Pictures, positions_of
from engine.targets.nvidia.kernels.attention.kv_cache import LENGTH_UNIT
from engine.targets.nvidia.weights import GPUModel

_AHEAD = 1024
"""Rows that are written beyond what a step reads: those of steps to come."""


class MRopeAngles:
    """The tables of rotary embeddings with sections, of which each of `parallel` sequences has its own rows. They are
    written as far as steps come: all rows of a long context would take longer than a short answer."""

    def __init__(self, model: GPUModel, context: int, parallel: int, room: PictureRoom | None) -> None:
        length = -(-context // LENGTH_UNIT) * LENGTH_UNIT
        self._of: list[Pictures | None] = [None] * parallel  # whose positions a sequence's rows have
        self._right = [length] * parallel  # how many of its first rows are right
        self._ropes = [
            (rope, rope.tables(length, context), tensors)
            for rope, tensors in zip(model.spec.ropes, model.ropes, strict=True)
            if room and rope.sections
        ]
        self._length = length

    def turn(self, slots: Sequence[Slot]) -> None:
        """Before steps of these slots: gives their sequences the angles of their pictures, or of a text."""
        for slot in slots if self._ropes else ():
            row, pictures = slot.sequence, slot.pictures
            if self._of[row] is not pictures:
                both = (each.placed[0].first for each in (self._of[row], pictures) if each and each.placed)
                self._right[row] = min([self._right[row], *both])
                self._of[row] = pictures
            end = slot.position + len(slot.inputs)
            if self._right[row] < min(end + _AHEAD // 2, self._length):
                self._write(row, self._right[row], min(end + _AHEAD, self._length))

    def _write(self, sequence: int, first: int, end: int) -> None:
        """The rows from `first` to `end` - 1 of a sequence."""
        places = np.minimum(positions_of(self._of[sequence], first, end - first), self._length - 1)
        for rope, tables, tensors in self._ropes:
            by_pair = places[rope.turned_by].T, np.arange(rope.pairs)
            for table, tensor in zip(tables, tensors, strict=True):
                overwrite(tensor, table[by_pair], sequence * table.size + first * rope.pairs)
        self._right[sequence] = end
