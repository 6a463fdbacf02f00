"""The weights of a file as float32, where they are computed with before they reach a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dequantized(rows: NDArray[np.uint8], ggml_type: int) -> NDArray[np.float32]:
    """The weights in rows of whole blocks: uint8 (rows, bytes) becomes float32 (rows, columns). Raises
    NotImplementedError for types that the package gguf does not know."""
    from gguf import GGMLQuantizationType, quants  # takes a quarter of a second

    try:
        kind = GGMLQuantizationType(ggml_type)
    except ValueError:
        raise NotImplementedError from None
    return np.asarray(quants.dequantize(rows, kind), np.float32)
