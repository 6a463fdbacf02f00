"""The angles of sequences whose tokens have other positions than their places (`engine.runtime.pictures`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.kernels.device_memory import overwrite
from engine.runtime.model_runner import Slot
from engine.runtime.pictures import PictureRoom, Pictures, positions_of
from engine.targets.nvidia.kernels.kv_cache import LENGTH_UNIT
from engine.targets.nvidia.weights import GPUModel


class OwnAngles:
    """The tables of rotary embeddings with sections, of which each of `parallel` sequences has its own rows."""

    def __init__(self, model: GPUModel, context: int, parallel: int, room: PictureRoom | None) -> None:
        length = -(-context // LENGTH_UNIT) * LENGTH_UNIT
        self._of: list[Pictures | None] = [None] * parallel  # whose positions a sequence's rows have
        self._ropes = [
            (rope, rope.tables(length, context), tensors)
            for rope, tensors in zip(model.spec.ropes, model.ropes, strict=True)
            if room and rope.sections
        ]
        self._length = length

    def turn(self, slots: Sequence[Slot]) -> None:
        """Before steps of these slots: gives their sequences the angles of their pictures, or of a text."""
        for slot in slots if self._ropes else ():
            if self._of[slot.sequence] is slot.pictures:
                continue
            self._of[slot.sequence] = slot.pictures
            places = np.minimum(positions_of(slot.pictures, 0, self._length), self._length - 1)
            for rope, tables, tensors in self._ropes:
                by_pair = places[rope.turned_by].T, np.arange(rope.pairs)
                for table, tensor in zip(tables, tensors, strict=True):
                    overwrite(tensor, table[by_pair], slot.sequence * table.size)
