"""What the time mixings of all versions of RWKV have, as data."""

from __future__ import annotations

from dataclasses import dataclass

from engine.description.checked_file import CheckedFile
from engine.description.head_reader import MAX_HEAD
from engine.description.recurrent import Recurrent
from engine.description.sublayers import Vector, Weight
from engine.formats.gguf import damaged


@dataclass(frozen=True)
class MixingHeads(Recurrent):
    """Of `heads` heads with a state (size keys, size values) each. A LayerNorm of what a head reads of its state is
    taken if there is a `norm`, which has a bias then. A sequence keeps the states, and the last token that was read."""

    receptance: Weight
    key: Weight
    value: Weight
    out: Weight
    decay_bias: Vector
    norm: Vector | None
    norm_bias: Vector | None
    heads: int
    size: int

    NORM_EPS = 64e-5

    @property
    def width(self) -> int:
        """Elements of what it reads of a token, and of its result."""
        return self.heads * self.size

    @property
    def row_elements(self) -> int:
        """Also x, what is read of it, and y."""
        return super().row_elements + 8 * self.width

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.heads, self.size, self.size), (1, self.width)


def read_head_size(file: CheckedFile, dim: int) -> int:
    """Raises ModelFileError for heads that do not divide a token of `dim` elements, or are too large."""
    size = file.size("wkv.head_size")
    if dim % size or size > MAX_HEAD:
        raise damaged(file.file.path, f"it has heads of {size} elements in {dim}")
    return size
