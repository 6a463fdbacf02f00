"""Quantizes weights to Q4_K and Q6_K, which the gguf package does not do.

A scale starts from the largest value of its group; of a few scales around it, the one with the least squared error is
taken. The layouts are block_q4_K and block_q6_K in ggml/src/ggml-common.h of llama.cpp; the packing is the inverse of
dequantize_row_q4_K and dequantize_row_q6_K in ggml/src/ggml-quants.c.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 256
_TRIES = np.linspace(0.85, 1.15, 13, dtype=np.float32)


def quantize_q6_k(weights: Floats) -> Bytes:
    """float32 (rows, cols), cols a multiple of 256 -> uint8 (rows, cols / 256 * 210)."""
    groups = weights.reshape(-1, 16, 16)
    scale = _best(
        groups, np.abs(groups).max(-1) / 31, lambda s: np.clip(_divided(groups, s), -32, 31) * s[..., None]
    )
    d = _half(np.abs(scale).max(-1) / 127)
    small = np.clip(_divided(scale, d), -127, 127).astype(np.int8)  # the groups' scales, in units of d
    q = np.clip(_divided(groups, small * d[:, None]), -32, 31).astype(np.int8) + 32
    fields = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128; in each, four runs of 32 share bytes
    low = (fields[:, :, :2] & 15) | (fields[:, :, 2:] & 15) << 4
    high = fields >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (low.reshape(-1, 128), high.reshape(-1, 64), small.view(np.uint8), _bytes(d))
    return np.concatenate(parts, 1).reshape(len(weights), -1)


def quantize_q4_k(weights: Floats) -> Bytes:
    """float32 (rows, cols), cols a multiple of 256 -> uint8 (rows, cols / 256 * 144)."""
    groups = weights.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    lifted = groups - least[..., None]
    scale = _best(lifted, lifted.max(-1) / 15, lambda s: np.clip(_divided(lifted, s), 0, 15) * s[..., None])
    d, m = _half(scale.max(-1) / 63), _half(-least.min(-1) / 63)
    scales = np.clip(_divided(scale, d), 0, 63).astype(np.uint8)
    minima = np.clip(_divided(-least, m), 0, 63).astype(np.uint8)
    lifted = groups + (minima * m[:, None])[..., None]
    q = np.clip(_divided(lifted, scales * d[:, None]), 0, 15).astype(np.uint8)
    pairs = q[:, 0::2] | q[:, 1::2] << 4  # two groups share bytes
    first = np.concatenate(
        (scales[:, :4] | (scales[:, 4:] >> 4) << 6, minima[:, :4] | (minima[:, 4:] >> 4) << 6), 1
    )
    last = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    parts = (_bytes(d), _bytes(m), first, last, pairs.reshape(-1, 128))
    return np.concatenate(parts, 1).reshape(len(weights), -1)


def _best(groups: Floats, scale: Floats, restored: Callable[[Floats], Floats]) -> Floats:
    """For each group, the scale around `scale` with the least squared error of the `restored` weights."""
    best, least = scale, np.full(scale.shape, np.inf, np.float32)
    for factor in _TRIES:
        tried = scale * factor
        error = ((groups - restored(tried)) ** 2).sum(-1)
        best = np.where(error < least, tried, best)
        least = np.minimum(error, least)
    return best


def _divided(values: Floats, scale: Floats) -> Floats:
    """values / scale, rounded; 0 where the scale is 0."""
    wide = scale[..., None] if scale.ndim < values.ndim else scale
    return np.rint(np.divide(values, wide, out=np.zeros_like(values), where=wide != 0))


def _half(values: Floats) -> Floats:
    """Values rounded to half precision, in float32."""
    return values.astype(np.float16).astype(np.float32)


def _bytes(values: Floats) -> Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)
