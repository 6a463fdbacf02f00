"""The recurrent states of sequences on a GPU, and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes

from engine.kernels.device_memory import device_zeros, overwrite, read_rows
from engine.runtime.checkpoints import checkpoint_slots
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.recurrent.state_memory import copy_state
from engine.targets.nvidia.sublayers.recurrent import RecurrentHandler


class DeviceStates:
    """Implements `engine.runtime.checkpoints.StateStore` for the recurrent layers of a model, of `parallel` sequences.
    A step reads the half of a memory that its position says and writes the other (`kernels.state_memory`), so one that
    ran ahead and is not needed changes nothing: it does not count."""

    def __init__(self, layers: Sequence[RecurrentHandler], parallel: int = 1) -> None:
        self.state_slots = checkpoint_slots(parallel) if layers else 0
        self.state_bytes = sum(4 * layer.of.state_size for layer in layers)
        self._layers, self._positions, self._of_slots = layers, dict[int, int](), dict[int, int]()
        slots = self.state_slots
        self.checkpoints = [device_zeros(slots * layer.of.state_size) for layer in layers]
        self._place = device_zeros(3, dtypes.int32)
        self._captured: dict[bool, Callable[[], None]] = {}

    def set(self, position: int, sequence: int = 0) -> None:
        """Says that a sequence has so many tokens."""
        self._positions[sequence] = position

    def state_position(self, sequence: int = 0) -> int:
        return self._positions.get(sequence, 0)

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._of_slots[slot] = self.state_position(sequence)
        self._copy(slot, sequence, saves=True)

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._positions[sequence] = self._of_slots[slot]
        self._copy(slot, sequence, saves=False)

    @property
    def layout(self) -> str:
        """How `export_state` arranges a state; "" if there is none."""
        return f"GPU {[layer.of for layer in self._layers]}" if self._layers else ""

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        parts = [read_rows(checkpoints, self.state_slots, [slot])[0] for checkpoints in self.checkpoints]
        return np.concatenate(parts).view(np.uint8)

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        self._of_slots[slot] = position
        *firsts, _ = accumulate((layer.of.state_size for layer in self._layers), initial=0)
        for checkpoints, layer, first in zip(self.checkpoints, self._layers, firsts, strict=True):
            n = layer.of.state_size
            overwrite(checkpoints, export.view(np.float32)[first : first + n], slot * n)

    def kernels(self) -> list[KernelSequence]:
        """All kernels."""
        return [self._kernels(saves) for saves in (True, False)] if self._layers else []

    def _kernels(self, saves: bool) -> KernelSequence:
        """The kernels that copy all states of a sequence to their checkpoints, or back."""
        sequence = KernelSequence()
        for layer, checkpoints in zip(self._layers, self.checkpoints, strict=True):
            kernel = copy_state(layer.of, self.state_slots, saves)
            sequence.add(kernel, memory=layer.memory, checkpoints=checkpoints, place=self._place)
        return sequence

    def _copy(self, slot: int, sequence: int, saves: bool) -> None:
        overwrite(self._place, np.asarray([self.state_position(sequence), slot, sequence], np.int32))
        if saves not in self._captured:
            self._captured[saves] = self._kernels(saves).capture()
        self._captured[saves]()
