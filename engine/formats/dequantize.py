"""Weights of a file as float32 on the host, and floats as they are in files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.formats.ggml_types import GGML_TYPES

HOST_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""Those that encoders of pictures have: they are read without the package gguf, which takes a quarter of a second."""


def dequantized(raw: NDArray[np.uint8], ggml_type: int) -> NDArray[np.float32]:
    """The weights in whole blocks: uint8 (..., bytes) becomes float32 (..., columns). Raises NotImplementedError for
    types that are neither of `HOST_TYPES` nor known to the package gguf."""
    match GGML_TYPES[ggml_type].name:
        case "F32":
            return raw.view(np.float32)
        case "F16":
            return raw.view(np.float16).astype(np.float32)
        case "BF16":  # the upper half of a float32
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "Q8_0":
            blocks = raw.reshape(-1, 34)
            scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
            return (blocks[:, 2:].view(np.int8) * scales).reshape(*raw.shape[:-1], -1)
    from gguf import GGMLQuantizationType, quants

    try:
        kind = GGMLQuantizationType(ggml_type)
    except ValueError:
        raise NotImplementedError from None
    return np.asarray(quants.dequantize(raw, kind), np.float32)


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
