"""Copies blocks of tokens between the KV cache and the order in which it is kept on disk, in KV cache format q8_0
(`engine.formats.kv_format`): of a layer int8 (2, kv heads, tokens, dim), keys and then values, and the scales, float16
(2, kv heads, tokens, dim / 32)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.formats.kv_format import QUANT_BLOCK, KVFormat
from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.attention import quantized_cache
from engine.targets.nvidia.kernels.attention.cache_tiles import STORAGES
from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    I32,
    f32,
    finish,
    load,
    load_index,
    load_run,
    maximum,
    store,
    store_run,
)

_THREADS = 32


def export_sizes(heads: Heads, tokens: int) -> tuple[int, int]:
    """The elements and the scales of a chunk."""
    elements = 2 * heads.kv * tokens * heads.dim
    return elements, elements // QUANT_BLOCK


@functools.cache
def export_tokens(heads: Heads, tokens: int) -> Kernel:
    """Quantizes `tokens` tokens, whole blocks, unless the cache is in that format already. Buffers: quants, int8, and
    scales, float16 (`export_sizes`); cache (`Heads.cache_planes`); blocks, those of the layer's pool, int32 (tokens /
    `Heads.block`,), -1 for any."""
    h = heads

    def kernel(quants: UOp, scales: UOp, cache: Sequence[UOp], blocks: UOp) -> UOp:
        head, block, token, number = _thread(h, tokens)
        tile, _ = _tile(h, head, blocks, token)
        stores: list[UOp] = []
        for side in (0, 1):
            integers, scale = _quantized(h, cache, side, tile, token, block)
            at = side * (h.kv * tokens * h.dim // QUANT_BLOCK) + number
            stores += [store(scales, at, scale), *store_run(quants, at * QUANT_BLOCK, integers)]
        return finish(f"kv_export_{h.name}_{tokens}", stores)

    return Kernel(kernel, ("quants", "scales"), (("cache", len(h.cache_planes)), "blocks"))


@functools.cache
def import_tokens(heads: Heads, tokens: int) -> Kernel:
    """The other way round, with the same buffers, except where a block is -1."""
    h, storage = heads, STORAGES[heads.kv_format]

    def kernel(cache: Sequence[UOp], quants: UOp, scales: UOp, blocks: UOp) -> UOp:
        head, block, token, number = _thread(h, tokens)
        tile, valid = _tile(h, head, blocks, token)
        stores = []
        for side in (0, 1):
            at = side * (h.kv * tokens * h.dim // QUANT_BLOCK) + number
            scale = load(scales, at).cast(F32)
            elements = [x.cast(F32) * scale for x in load_run(quants, at * QUANT_BLOCK, QUANT_BLOCK)]
            for i, quad in enumerate(_quads(block)):
                own = elements[4 * i : 4 * i + 4]
                stores += storage.store_quad(h, cache, side, tile, token, quad, elements, own, valid)
        return finish(f"kv_import_{h.name}_{tokens}", stores)

    return Kernel(kernel, (("cache", len(h.cache_planes)),), ("quants", "scales", "blocks"))


def _quantized(
    heads: Heads, cache: Sequence[UOp], side: int, tile: UOp, token: UOp, block: UOp
) -> tuple[list[UOp], UOp]:
    """The integers of a block of a token's keys (`side` is 0) or values (1), int32, and its scale, float16."""
    h, quads = heads, _quads(block)
    if h.kv_format is KVFormat.Q8_0:
        loaded = [quantized_cache.load_integers(h, cache, side, tile, token, quad) for quad in quads]
        return [x for integers, _ in loaded for x in integers], loaded[0][1]
    load_quad = STORAGES[h.kv_format].load_quad
    xs = [x for quad in quads for x in load_quad(h, cache, side, tile, token, quad)]
    scale = (maximum([x.maximum(x * f32(-1)) for x in xs]) * f32(1 / 127)).cast(F16)
    step = scale.cast(F32)
    factor = (step > f32(0)).where(step.reciprocal(), f32(0))
    # a cast to int32 cuts the fraction off, so the number to round is made positive
    rounded = [(x * factor + f32(128.5)).cast(I32) - 128 for x in xs]
    return [x.maximum(-127).minimum(127) for x in rounded], scale


def _tile(heads: Heads, kv: UOp, blocks: UOp, token: UOp) -> tuple[UOp, UOp]:
    """The tile of a token (`Heads.tile`), and whether it is there."""
    number = token // heads.block
    tile = heads.tile(kv, load_index(blocks, number, heads.pool), token // TILE)
    return tile, load(blocks, number) > -1


def _thread(heads: Heads, tokens: int) -> tuple[UOp, UOp, UOp, UOp]:
    """What a thread copies: the head, the block of it, the token, and the block's number among all of a side."""
    blocks = heads.dim // QUANT_BLOCK
    row = UOp.special(heads.kv * blocks, "gidx1")
    token = UOp.special(tokens // _THREADS, "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
    head, block = row // blocks, row % blocks
    return head, block, token, (head * tokens + token) * blocks + block


def _quads(block: UOp) -> list[UOp]:
    return [block * (QUANT_BLOCK // 4) + i for i in range(QUANT_BLOCK // 4)]
