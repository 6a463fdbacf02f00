"""The weights of a file as float32, where they are computed with before they reach a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.formats.ggml_types import GGML_TYPES


def dequantized(rows: NDArray[np.uint8], ggml_type: int) -> NDArray[np.float32]:
    """The weights in rows of whole blocks: uint8 (rows, bytes) becomes float32 (rows, columns). Raises
    NotImplementedError for types that the package gguf does not know."""
    from gguf import GGMLQuantizationType, quants  # takes a quarter of a second

    try:
        kind = GGMLQuantizationType(ggml_type)
    except ValueError:
        raise NotImplementedError from None
    return np.asarray(quants.dequantize(rows, kind), np.float32)


def encoded_floats(floats: NDArray[np.float32], ggml_type: int) -> NDArray[np.uint8]:
    """float32 as F32, F16 or BF16: uint8 (bytes,)."""
    match GGML_TYPES[ggml_type].name:
        case "F32":
            return np.ascontiguousarray(floats).view(np.uint8).reshape(-1)
        case "F16":
            return floats.astype(np.float16).view(np.uint8).reshape(-1)
    # To the nearest upper half, of two equally near ones the even one.
    bits = np.ascontiguousarray(floats).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
