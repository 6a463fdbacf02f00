"""Copies chunks of a CPU's KV cache out and in, for `engine.runtime.prefix_store`.

An export holds, of all layers one after another, the keys and values in the KV cache format q8_0 (`engine.formats.
kv_format`): int8 (layer, 2, kv heads, CHUNK, dim), then the scales, float16 (layer, 2, kv heads, CHUNK, dim / 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.kv_format import QUANT_BLOCK
from engine.runtime.prefix_store import CHUNK
from engine.targets.cpu.kernels.rope import HeadLanes

CachedLayer = tuple[HeadLanes, list[NDArray[Any]]]
"""The keys and values of a layer, and their scales if there are any, as `HeadLanes` says they lie."""

Blocks = NDArray[np.intp]
"""The blocks of a layer that hold the tokens of a chunk."""


def export_blocks(layers: Sequence[CachedLayer], blocks: Sequence[Blocks]) -> NDArray[np.uint8]:
    """The keys and values of CHUNK tokens, uint8 (bytes,), which are in these blocks of each layer."""
    both = (x for layer, own in zip(layers, blocks, strict=True) for x in _read(layer, own))
    quants, scales = zip(*map(quantized, both), strict=True)
    return np.concatenate([x.reshape(-1).view(np.uint8) for x in (*quants, *scales)])


def import_blocks(layers: Sequence[CachedLayer], blocks: Sequence[Blocks], export: NDArray[np.uint8]) -> None:
    """Stores what `export_blocks` gave."""
    sizes = [heads.kv * CHUNK * heads.dim for heads, _ in layers for _ in range(2)]
    quants = export[: sum(sizes)].view(np.int8)
    scales = export[sum(sizes) :].view(np.float16)
    done = 0
    for layer, own in zip(layers, blocks, strict=True):
        both = []
        for _ in range(2):
            size = layer[0].kv * CHUNK * layer[0].dim
            groups = quants[done : done + size].reshape(-1, QUANT_BLOCK).astype(np.float32)
            own_scales = scales[done // QUANT_BLOCK : (done + size) // QUANT_BLOCK]
            both.append((groups * own_scales[:, None].astype(np.float32)).reshape(layer[0].kv, CHUNK, -1))
            done += size
        _write(layer, own, *both)


def quantized(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Elements (..., dim) as int8 (..., dim) and scales, float16 (..., dim / 32)."""
    blocks = x.reshape(*x.shape[:-1], -1, QUANT_BLOCK)
    scales = (np.abs(blocks).max(-1) / 127).astype(np.float16)
    steps = np.divide(1, scales, dtype=np.float32, where=scales > 0, out=np.zeros(scales.shape, np.float32))
    quants = np.rint(blocks * steps[..., None]).clip(-127, 127).astype(np.int8)
    return quants.reshape(x.shape), scales


def _read(layer: CachedLayer, blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values, float32 (kv heads, CHUNK, dim) each."""
    heads, (keys, values, *scales) = layer
    k = _tiles(heads, keys, heads.dim)[:, blocks].swapaxes(3, 4)
    v = _rows(heads, values)[:, blocks]
    k, v = (x.reshape(heads.kv, CHUNK, heads.dim).astype(np.float32) for x in (k, v))
    if scales:
        of_blocks = (
            _tiles(heads, s, heads.dim // QUANT_BLOCK)[:, blocks].swapaxes(3, 4).reshape(heads.kv, CHUNK, -1)
            for s in scales
        )
        k, v = (x * s.repeat(QUANT_BLOCK, -1) for x, s in zip((k, v), of_blocks, strict=True))
    return k, v


def _write(layer: CachedLayer, blocks: Blocks, k: NDArray[Any], v: NDArray[Any]) -> None:
    heads, (keys, values, *scales) = layer
    shape = heads.kv, len(blocks), heads.block // heads.lanes, heads.lanes, -1
    if scales:
        (k, k_scales), (v, v_scales) = quantized(k), quantized(v)
        for own_scales, new in zip(scales, (k_scales, v_scales), strict=True):
            _tiles(heads, own_scales, heads.dim // QUANT_BLOCK)[:, blocks] = new.reshape(shape).swapaxes(3, 4)
    _tiles(heads, keys, heads.dim)[:, blocks] = k.reshape(shape).swapaxes(3, 4)
    _rows(heads, values)[:, blocks] = v.reshape(heads.kv, len(blocks), heads.block, heads.dim)


def _tiles(heads: HeadLanes, x: NDArray[Any], elements: int) -> NDArray[Any]:
    """Keys, or scales, of which a token has so many: (kv heads, blocks, vectors of tokens, elements, lanes)."""
    vectors = heads.block // heads.lanes
    return x.reshape(heads.kv, -1, vectors, elements, heads.lanes)


def _rows(heads: HeadLanes, values: NDArray[Any]) -> NDArray[Any]:
    """(kv heads, blocks, tokens, dim)."""
    return values.reshape(heads.kv, -1, heads.block, heads.dim)
