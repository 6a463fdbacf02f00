"""The recurrent states of sequences as tensors, and copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import Tensor, TinyJit, UOp, dtypes

from engine.description.recurrent import Recurrent


@dataclass(frozen=True)
class States:
    """What sequences keep of their tokens in one layer: of each part of a state (`Recurrent.state_shapes`) those of all
    sequences, one after the other."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def zeros(cls, operator: Recurrent, sequences: int) -> States:
        shapes = ((sequences, *shape) for shape in operator.state_shapes)
        return cls(
            tuple(Tensor.zeros(*shape, dtype=dtypes.float32).contiguous().realize() for shape in shapes)
        )

    def of(self, sequence: UOp) -> list[Tensor]:
        """The state of one of the sequences."""
        return [tensor[sequence : sequence + 1].squeeze(0) for tensor in self.tensors]

    def store(self, sequence: UOp, y: Tensor, *state: Tensor) -> Tensor:
        """Gives a sequence another state, and returns y, the layer's result, in memory: both are made of the state
        before."""
        y, *made = (tensor.contiguous() for tensor in (y, *state))
        Tensor.realize(y, *made)  # they read what they are stored to
        for all_, one in zip(self.tensors, made, strict=True):
            store_row(all_, sequence, one)
        return y


def store_row(rows: Tensor, row: UOp, x: Tensor) -> None:
    """Stores x in one of several rows."""
    stored = rows[row : row + 1].uop.store(x.unsqueeze(0).uop)
    Tensor(rows.uop.after(stored)).realize()


class StateCopies:
    """Copies of the states of all layers, in `slots` slots."""

    def __init__(self, states: Sequence[States], slots: int) -> None:
        self._live = [tensor for state in states for tensor in state.tensors]
        self._kept = [
            Tensor.zeros(slots, *tensor.shape[1:], dtype=tensor.dtype).contiguous().realize()
            for tensor in self._live
        ]
        sequences = int(self._live[0].shape[0]) if self._live else 1
        self._slot = UOp.variable("slot", 0, max(slots - 1, 0))
        self._sequence = UOp.variable("sequence", 0, sequences - 1)
        self._save, self._load, self._clear = map(TinyJit, (self._saved, self._loaded, self._cleared))
        self._save.cnt = self._load.cnt = self._clear.cnt = 1  # capture at the first call, not at the second

    def save(self, slot: int, sequence: int) -> None:
        if self._live:
            self._save(self._slot.bind(slot), self._sequence.bind(sequence))

    def load(self, slot: int, sequence: int) -> None:
        if self._live:
            self._load(self._slot.bind(slot), self._sequence.bind(sequence))

    def clear(self, sequence: int) -> None:
        """Makes the states of a sequence those before any token."""
        if self._live:
            self._clear(self._sequence.bind(sequence))

    def _saved(self, slot: UOp, sequence: UOp) -> None:
        for kept, live in zip(self._kept, self._live, strict=True):
            store_row(kept, slot, live[sequence : sequence + 1].squeeze(0))

    def _loaded(self, slot: UOp, sequence: UOp) -> None:
        for kept, live in zip(self._kept, self._live, strict=True):
            store_row(live, sequence, kept[slot : slot + 1].squeeze(0))

    def _cleared(self, sequence: UOp) -> None:
        for live in self._live:
            store_row(live, sequence, Tensor.zeros(live.shape[1:], dtype=live.dtype))
