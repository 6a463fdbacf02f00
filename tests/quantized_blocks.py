"""Random matrices in the quantization types of files."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import (
    FLOATS,
    FORMATS,
    WIDENED_IQ1,
    WIDENED_IQ2,
    WIDENED_IQ3_S,
    WIDENED_IQ3_XXS,
    WIDENED_NVFP4,
)

I2_S, Q1_0, Q2_0 = 36, 41, 42
IN_FILES = {WIDENED_IQ1: 19, WIDENED_IQ2: 22, WIDENED_IQ3_XXS: 18, WIDENED_IQ3_S: 21, WIDENED_NVFP4: 40}
"""For each type that is read for others one of these."""


def random_blocks(kind: int, rows: int, cols: int) -> np.ndarray:
    """Blocks of random bits, uint8 (rows, bytes of a row), but for their float16 scales."""
    rng = np.random.default_rng(kind)
    _, block, block_bytes = GGML_TYPES[kind]
    if kind in FLOATS:
        return gguf.quantize(rng.standard_normal((rows, cols)).astype(np.float32), kind).view(np.uint8)
    data = rng.integers(0, 256, (rows * cols // block, block_bytes), dtype=np.uint8)
    scales = rng.standard_normal((len(data), 2)).astype(np.float16).view(np.uint8)
    if kind == Type.NVFP4:  # scales up to eight times as large as others, and both zeros
        data[:, :4] = rng.integers(40, 64, (len(data), 4))
        data[::5, 0], data[::7, 1] = 0, 127
        return data.reshape(rows, -1)
    if (format := FORMATS.get(kind)) is None:  # of a grid, or TQ1_0 or I2_S
        if kind == Type.IQ1_M:
            data[:, 55] = data[:, 55] & 15 | 48  # the exponent of its scale is none of infinities
        else:
            at = 52 if kind == Type.TQ1_0 else 0
            if kind != I2_S:
                data[:, at : at + 2] = scales[:, :2]
        return data.reshape(rows, -1)
    if format.exponent:
        data[:, format.d] = rng.integers(118, 128, len(data))
    else:
        data[:, format.d : format.d + 2] = scales[:, :2]
    if format.m is not None:
        data[:, format.m : format.m + 2] = scales[:, 2:]
    return data.reshape(rows, -1)


def dequantized(kind: int, blocks: np.ndarray) -> np.ndarray:
    """The weights in blocks of a type of files, float32 of (rows, weights of a row)."""
    if kind == I2_S:  # 128 numbers in 32 bytes, in the upper bits first; the package does not know this type
        q = blocks.reshape(-1, 1, 32) >> np.array([[6], [4], [2], [0]]) & 3
        return q.astype(np.float32).reshape(len(blocks), -1) - 1
    if kind not in (Q1_0, Q2_0):
        return gguf.dequantize(blocks, Type(kind))
    data = blocks.reshape(-1, 18)  # nor these
    d = data[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q1_0:
        values = np.unpackbits(data[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    else:
        values = (data[:, 2:, None] >> np.arange(0, 8, 2) & 3).reshape(len(data), 64).astype(np.float32) - 1
    return (d * values).reshape(len(blocks), -1)
