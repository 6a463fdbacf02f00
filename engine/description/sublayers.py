"""What all sublayers of a model have in common, as data: an `Operator` says which tensors of the file it needs.

Those with attention are in `attention`, feed-forward layers and mixtures of experts in `feed_forward`, layers with a
state in `recurrent`, what goes on between several residual streams in `altup` and `hyper_connections`.
`engine.description.spec` puts a model together from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from engine.formats.ggml_types import TYPES
from engine.formats.rope_order import HeadOrder
from engine.protocol.events import KernelRole

T = TypeVar("T")


@dataclass(frozen=True)
class Weight:
    """A matrix (rows, cols) of the ggml type `type`: the rows of a tensor of the file from `first` on. `order`: the
    rows are those of heads, to be reordered. With `experts`, as many such matrices, one after the other. With `every`,
    the rows of these are the first `run` of each `every` rows of the tensor, from `first` on. With `of_cols`, the
    tensor has so many columns, of which these are `cols` from `first_col` on, whole blocks.

    With a `scale`, a tensor of one number or of one for each expert, the weights are multiplied by it. Those of a
    `blank` one are zeros, whatever the tensor has.

    If it is `transposed`, the matrix of expert i is, as floats of this type, the transpose of the `cols` rows of the
    tensor from `first` + i * `every` on."""

    tensor: str
    rows: int
    cols: int
    type: int
    first: int = 0
    order: HeadOrder | None = None
    experts: int = 1
    every: int = 0
    run: int = 0
    first_col: int = 0
    of_cols: int = 0
    transposed: bool = False
    scale: str = ""
    blank: bool = False

    @property
    def name(self) -> str:
        """The tensor's name without the layer and the suffix: attn_q."""
        return self.tensor.removesuffix(".weight").rpartition(".")[2]

    @property
    def key(self) -> str:
        """Tells the matrix from all others of its file."""
        others = (f",{self.first_col}" if self.first_col else "") + ",blank" * self.blank
        return f"{self.tensor}@{self.first}{others}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is read from the file (`engine.formats.widening`)."""
        return self._bytes(self.cols)

    @property
    def tensor_row_bytes(self) -> int:
        """Bytes of the tensor's row that a row of these is a part of."""
        return self._bytes(self.of_cols or self.cols)

    @property
    def row_start(self) -> int:
        """How many bytes of the tensor's row come before that part."""
        return self._bytes(self.first_col)

    def _bytes(self, cols: int) -> int:
        type = TYPES[self.type]
        return cols // type.block * type.block_bytes

    @property
    def n_bytes(self) -> int:
        return self.experts * self.rows * self.row_bytes


@dataclass(frozen=True)
class Vector:
    """Floats of a tensor of the file: `size` from `first` on, reordered if they are those of heads, times `factor`.
    Without a tensor ("") they are ones, times that. Each number of the tensor is there `each` times in turn, and `size`
    counts them all."""

    tensor: str
    size: int
    first: int = 0
    order: HeadOrder | None = None
    factor: float = 1.0
    each: int = 1


Roles = dict[KernelRole, tuple[Weight | None, ...]]


@dataclass(frozen=True)
class Operator:
    """What a sublayer computes. All that it needs of the file is among its fields, or among those of its parts.
    `words`: what users read of it."""

    words: ClassVar[str]

    @property
    def roles(self) -> Roles:
        """Its matrices, by the role of the kernels that multiply by them."""
        return {}

    @cached_property  # a start asks a hundred times
    def parts(self) -> tuple[Operator, ...]:
        """The layers that it consists of."""
        return self._fields(Operator)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return *self._own_weights, *(weight for part in self.parts for weight in part.weights)

    @property
    def row_elements(self) -> int:
        """Elements of the rows that its own matrices make of a token."""
        return sum(weight.rows for weight in self._own_weights)

    @property
    def state_bytes(self) -> int:
        """Bytes of its recurrent state of a sequence; 0 if it has none."""
        return 0

    @property
    def is_keeping(self) -> bool:
        """Whether it keeps something of each token for the next ones: keys and values, or a state."""
        return self.state_bytes > 0

    @property
    def _own_weights(self) -> Iterator[Weight]:
        return (weight for weights in self.roles.values() for weight in weights if weight)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return *self._fields(Vector), *(vector for part in self.parts for vector in part.vectors)

    def _fields(self, kind: type[T]) -> tuple[T, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, kind))


def parts_of(value: Any) -> Iterator[Any]:
    """What a description consists of, down to matrices and vectors."""
    if isinstance(value, Weight | Vector):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from parts_of(getattr(value, field.name))
