"""The order of a head's elements, so that every model's rotary pairs lie half a head apart.

A file's heads may differ from that in two ways. Pairs may be neighbours (llama and others: LlamaModel.permute in
llama.cpp's convert_hf_to_gguf). And only the first elements of a head may be rotated (`rope.dimension_count`). The
engine rotates element i of a head with element i + head_dim / 2; pairs that are not rotated turn by no angle. Queries
and keys are put in the same order, which leaves their products as they are.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # lists of models are made without tinygrad
    from tinygrad import Tensor

Rows = TypeVar("Rows", "Tensor", NDArray[Any])


@dataclass(frozen=True)
class HeadOrder:
    """The order of a file's heads of `head_dim` elements, of which the first `rotated` are rotated. `interleaved`: the
    two elements of a pair are neighbours; else they are rotated / 2 apart. `halves`: so is each half of a head by
    itself, and all of it is rotated (Gemma 4's pictures)."""

    head_dim: int
    rotated: int
    interleaved: bool
    halves: bool = False

    @property
    def is_engines(self) -> bool:
        """Whether the file's order is the engine's."""
        return not (self.interleaved or self.halves) and self.rotated in (0, self.head_dim)

    def apply(self, rows: Rows) -> Rows:
        """Reorders the rows of heads, (heads * head_dim, ...): in each head the first elements of all pairs come first,
        then the second elements."""
        if self.is_engines:
            return rows
        heads = rows.reshape(int(rows.shape[0]) // self.head_dim, self.head_dim, *rows.shape[1:])
        turned, still = heads[:, : self.rotated], heads[:, self.rotated :]
        if self.halves:
            n = self.head_dim // 4
            quarters = [heads[:, i * n : (i + 1) * n] for i in (0, 2, 1, 3)]
            if isinstance(heads, np.ndarray):
                return np.concatenate(quarters, axis=1).reshape(rows.shape)
            return quarters[0].cat(*quarters[1:], dim=1).reshape(rows.shape)
        if self.interleaved:
            first, second = turned[:, 0::2], turned[:, 1::2]
        else:
            first, second = turned[:, : self.rotated // 2], turned[:, self.rotated // 2 :]
        half = (self.head_dim - self.rotated) // 2
        parts = [first, still[:, :half], second, still[:, half:]] if half else [first, second]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts, axis=1).reshape(rows.shape)
        return parts[0].cat(*parts[1:], dim=1).reshape(rows.shape)
