"""The order of rows in the query and key matrices of files whose rotary pairs are interleaved.

llama.cpp's convert_hf_to_gguf (LlamaModel.permute) stores the two elements of a rotated pair side by side in files of
architecture llama. The engine rotates element i of a head with element i + head_dim / 2, so it undoes that.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

Rows = TypeVar("Rows", Tensor, NDArray[Any])


def half_split(rows: Rows, head_dim: int) -> Rows:
    """Reorders the rows of heads, (heads * head_dim, ...), from interleaved pairs to halves: in each head the first
    elements of all pairs come first, then the second elements."""
    shape = int(rows.shape[0]) // head_dim, head_dim // 2, 2, *rows.shape[1:]
    pairs = rows.reshape(shape)
    halves = pairs.swapaxes(1, 2) if isinstance(pairs, np.ndarray) else pairs.transpose(1, 2)
    return halves.reshape(rows.shape)
