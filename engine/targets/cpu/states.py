"""The recurrent states of sequences on a CPU, and their checkpoints."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.runtime.checkpoints import checkpoint_slots
from engine.targets.cpu.kernels.delta_net import DeltaHeads
from engine.targets.cpu.kernels.memory import view, zeros

Floats = NDArray[np.float32]


class CPUStates:
    """Implements `engine.runtime.checkpoints.StateStore` for `parallel` sequences. `memory`: the states of all layers,
    float32 (parallel, elements) each."""

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.memory = list[Floats]()
        self._checkpoints, self._nets = list[Floats](), list[DeltaHeads]()
        self._positions, self._of_slots = [0] * parallel, [0] * checkpoint_slots(parallel)

    @property
    def state_slots(self) -> int:
        return len(self._of_slots) if self.memory else 0

    @property
    def layout(self) -> str:
        """How `export_state` arranges a state; "" if there is none."""
        return f"CPU {self._nets}" if self._nets else ""

    @property
    def state_bytes(self) -> int:
        return sum(states[0].nbytes for states in self.memory)

    def add(self, net: DeltaHeads) -> list[Tensor]:
        """The states and the inputs of one more layer, of all sequences."""
        self._nets.append(net)
        sizes = net.state_size, net.inputs_size
        added = [zeros(self.parallel * size, dtypes.float32) for size in sizes]
        kept = [zeros(len(self._of_slots) * size, dtypes.float32, sparse=True) for size in sizes]
        self.memory += [view(t).reshape(self.parallel, -1) for t in added]
        self._checkpoints += [view(t).reshape(len(self._of_slots), -1) for t in kept]
        return added

    def begin(self, position: int, tokens: int, sequence: int = 0) -> None:
        """To be called before a step of so many tokens at a position."""
        if position == 0:
            for states in self.memory:
                states[sequence] = 0
        self._positions[sequence] = position + tokens

    def state_position(self, sequence: int = 0) -> int:
        return self._positions[sequence]

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._of_slots[slot] = self._positions[sequence]
        for states, kept in zip(self.memory, self._checkpoints, strict=True):
            kept[slot] = states[sequence]

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._positions[sequence] = self._of_slots[slot]
        for states, kept in zip(self.memory, self._checkpoints, strict=True):
            states[sequence] = kept[slot]

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        return np.concatenate([kept[slot] for kept in self._checkpoints]).view(np.uint8)

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        self._of_slots[slot], done = position, 0
        for kept in self._checkpoints:
            kept[slot] = export[done : done + kept[slot].nbytes].view(np.float32)
            done += kept[slot].nbytes
