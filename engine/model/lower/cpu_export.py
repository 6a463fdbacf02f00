"""Copies chunks of a CPU's KV cache out and in, for `engine.model.prefix_store`.

An export holds, of all layers one after another, the keys and values in the KV cache format q8_0 (`engine.formats.
kv_format`): int8 (layer, 2, kv heads, CHUNK, dim), then the scales, float16 (layer, 2, kv heads, CHUNK, dim / 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.kv_format import QUANT_BLOCK
from engine.kernels.cpu.rope import Heads
from engine.model.prefix_store import CHUNK

CachedLayer = tuple[Heads, list[NDArray[Any]]]
"""The keys and values of a layer, and their scales if there are any, as `Heads` says they lie."""


def export_chunk(layers: Sequence[CachedLayer], position: int) -> NDArray[np.uint8]:
    """The keys and values of CHUNK tokens, uint8 (bytes,)."""
    quants, scales = zip(*(quantized(x) for layer in layers for x in _read(layer, position)), strict=True)
    return np.concatenate([x.reshape(-1).view(np.uint8) for x in (*quants, *scales)])


def import_chunk(layers: Sequence[CachedLayer], position: int, export: NDArray[np.uint8]) -> None:
    """Stores what `export_chunk` gave."""
    sizes = [heads.kv * CHUNK * heads.dim for heads, _ in layers for _ in range(2)]
    quants = export[: sum(sizes)].view(np.int8)
    scales = export[sum(sizes) :].view(np.float16)
    done = 0
    for layer in layers:
        both = []
        for _ in range(2):
            size = layer[0].kv * CHUNK * layer[0].dim
            blocks = quants[done : done + size].reshape(-1, QUANT_BLOCK).astype(np.float32)
            own_scales = scales[done // QUANT_BLOCK : (done + size) // QUANT_BLOCK]
            both.append((blocks * own_scales[:, None].astype(np.float32)).reshape(layer[0].kv, CHUNK, -1))
            done += size
        _write(layer, position, *both)


def quantized(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Elements (..., dim) as int8 (..., dim) and scales, float16 (..., dim / 32)."""
    blocks = x.reshape(*x.shape[:-1], -1, QUANT_BLOCK)
    scales = (np.abs(blocks).max(-1) / 127).astype(np.float16)
    steps = np.divide(1, scales, dtype=np.float32, where=scales > 0, out=np.zeros(scales.shape, np.float32))
    quants = np.rint(blocks * steps[..., None]).clip(-127, 127).astype(np.int8)
    return quants.reshape(x.shape), scales


def _read(layer: CachedLayer, position: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values, float32 (kv heads, CHUNK, dim) each."""
    heads, (keys, values, *scales) = layer
    vectors, slots = _places(heads, position)
    k = keys.reshape(heads.kv, -1, heads.dim, heads.lanes)[:, vectors].swapaxes(2, 3)
    v = values.reshape(heads.kv, -1, heads.dim)[:, slots]
    k, v = k.reshape(heads.kv, CHUNK, heads.dim).astype(np.float32), v.astype(np.float32)
    if scales:
        of_blocks = (
            _scales(heads, s)[:, vectors].swapaxes(2, 3).reshape(heads.kv, CHUNK, -1) for s in scales
        )
        k, v = (x * s.repeat(QUANT_BLOCK, -1) for x, s in zip((k, v), of_blocks, strict=True))
    return k, v


def _write(layer: CachedLayer, position: int, k: NDArray[Any], v: NDArray[Any]) -> None:
    heads, (keys, values, *scales) = layer
    vectors, slots = _places(heads, position)
    if scales:
        (k, k_scales), (v, v_scales) = quantized(k), quantized(v)
        for own_scales, new in zip(scales, (k_scales, v_scales), strict=True):
            tiles = new.reshape(heads.kv, len(vectors), heads.lanes, -1).swapaxes(2, 3)
            _scales(heads, own_scales)[:, vectors] = tiles
    k_tiles = k.reshape(heads.kv, len(vectors), heads.lanes, heads.dim).swapaxes(2, 3)
    keys.reshape(heads.kv, -1, heads.dim, heads.lanes)[:, vectors] = k_tiles
    values.reshape(heads.kv, -1, heads.dim)[:, slots] = v


def _scales(heads: Heads, scales: NDArray[Any]) -> NDArray[Any]:
    """(kv heads, vectors of slots, blocks of a head's elements, lanes)."""
    return scales.reshape(heads.kv, -1, heads.dim // QUANT_BLOCK, heads.lanes)


def _places(heads: Heads, position: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The vectors of slots that hold a chunk's keys, and the slots of its values."""
    vectors = np.arange(position // heads.lanes, (position + CHUNK) // heads.lanes)
    slots = np.arange(position, position + CHUNK)
    return vectors % (heads.length // heads.lanes), slots % heads.length
