"""Weights as float32 on the host, of the types that encoders of pictures have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.formats.ggml_types import GGML_TYPES

HOST_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})


def dequantized(raw: NDArray[np.uint8], ggml_type: int) -> NDArray[np.float32]:
    """The weights in the bytes of a file, of one of `HOST_TYPES`: float32 (n,)."""
    match GGML_TYPES[ggml_type].name:
        case "F32":
            return raw.view(np.float32)
        case "F16":
            return raw.view(np.float16).astype(np.float32)
        case "BF16":  # the upper half of a float32
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, 34)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return (blocks[:, 2:].view(np.int8) * scales).reshape(-1)
