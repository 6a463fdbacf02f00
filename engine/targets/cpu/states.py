"""The recurrent states of sequences on a CPU, and their checkpoints."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.runtime.checkpoints import checkpoint_slots
from engine.targets.cpu.kernels.memory import view, zeros

Floats = NDArray[np.float32]


class StateLayout(Protocol):
    """How a layer arranges a state, which its `repr` tells."""

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Elements of the parts of a sequence's state."""


CHECKED = 4
"""The rows of a check, each of which has a state of its own until it is known how many are right."""


class CPUStates:
    """Implements `engine.runtime.checkpoints.StateStore` for `parallel` sequences. `memory`: the states of all layers,
    float32 (slots, elements) each. `slots`: where the rows of a step read and write them (`kernels.delta_net`)."""

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.memory = list[Floats]()
        self.slots = zeros(2 * max(parallel, CHECKED), dtypes.int32)
        self._checkpoints, self._layers = list[Floats](), list[StateLayout]()
        self._positions, self._of_slots = [0] * parallel, [0] * checkpoint_slots(parallel)
        self._slot_of = list(range(parallel))  # of each sequence
        self._spare = list(range(parallel, parallel + CHECKED))
        self._others: list[dict[int, int]] = [{} for _ in range(parallel)]
        """The slots of a sequence's states after fewer tokens, or more, by their number: those of its last check."""

    @property
    def state_slots(self) -> int:
        return len(self._of_slots) if self.memory else 0

    @property
    def layout(self) -> str:
        """How `export_state` arranges a state; "" if there is none."""
        return f"CPU {self._layers}" if self._layers else ""

    @property
    def state_bytes(self) -> int:
        return sum(states[0].nbytes for states in self.memory)

    def add(self, layer: StateLayout) -> list[Tensor]:
        """The parts of the states of one more layer, of all sequences."""
        self._layers.append(layer)
        sizes = layer.state_sizes
        slots = self.parallel + CHECKED
        added = [zeros(slots * size, dtypes.float32) for size in sizes]
        kept = [zeros(len(self._of_slots) * size, dtypes.float32, sparse=True) for size in sizes]
        self.memory += [view(t).reshape(slots, -1) for t in added]
        self._checkpoints += [view(t).reshape(len(self._of_slots), -1) for t in kept]
        return added

    def begin(self, row: int, position: int, tokens: int, sequence: int = 0) -> None:
        """To be called before a step that has so many tokens at a position, from a row on."""
        self._restart(position, sequence)
        view(self.slots)[2 * row : 2 * row + 2] = self._slot_of[sequence]
        self._positions[sequence] = position + tokens

    def begin_check(self, first: int, position: int, rows: int, sequence: int) -> None:
        """As `begin`, of so many rows of a sequence from row `first` on, each of which leaves a state of its own."""
        self._restart(position, sequence)
        for i in range(rows):
            source, target = self._slot_of[sequence], self._spare.pop()
            view(self.slots)[2 * (first + i) : 2 * (first + i) + 2] = source, target
            self._others[sequence][position + i] = source
            self._slot_of[sequence] = target
        self._positions[sequence] = position + rows

    def cut_state(self, sequence: int, position: int) -> None:
        others, current = self._others[sequence], self._positions[sequence]
        if position != current:
            others[current] = self._slot_of[sequence]
            self._slot_of[sequence], self._positions[sequence] = others.pop(position), position

    def settle(self) -> None:
        """Gives up the other states of the last check. To be called before a step begins."""
        for others in self._others:
            self._spare += others.values()
            others.clear()

    def _restart(self, position: int, sequence: int) -> None:
        if position == 0:
            for states in self.memory:
                states[self._slot_of[sequence]] = 0

    def state_position(self, sequence: int = 0) -> int:
        return self._positions[sequence]

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._of_slots[slot] = self._positions[sequence]
        for states, kept in zip(self.memory, self._checkpoints, strict=True):
            kept[slot] = states[self._slot_of[sequence]]

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._positions[sequence] = self._of_slots[slot]
        for states, kept in zip(self.memory, self._checkpoints, strict=True):
            states[self._slot_of[sequence]] = kept[slot]

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        return np.concatenate([kept[slot] for kept in self._checkpoints]).view(np.uint8)

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        self._of_slots[slot], done = position, 0
        for kept in self._checkpoints:
            kept[slot] = export[done : done + kept[slot].nbytes].view(np.float32)
            done += kept[slot].nbytes
