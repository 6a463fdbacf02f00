"""Attention of patches on 16-bit integers, which CPUs with AVX-512 multiply at twice the rate of floats.

Queries and keys are rounded with a scale for each of their rows, so that the sum of a score's products fits 32 bits.
Values have a scale for each key, and this is a factor of the key's weight. The weights of a tile of keys then have a
scale for each query. A vector has an element for each query of a tile: so largest scores, totals and scales are those
of whole vectors.

A task is a tile of queries of a head, in three passes that stay in a core's caches, as in `patch_attention`, and so are
windows.
"""

from __future__ import annotations

import functools
import math

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.kernel_builder import F32, I16, I32, Index, KernelBuilder, even_share
from engine.targets.cpu.kernels.patch_attention import KeyTiles
from engine.targets.cpu.kernels.patches import FIRST, PatchHeads, Tasks
from engine.targets.cpu.kernels.step_state import TILES

LANES = 16
"""The elements of the vectors for which this is faster than floats."""
_MASKED, _LEAST = -1e30, 1e-30


def most_rounded(terms: int) -> int:
    """The largest integer of which so many products fit 32 bits."""
    return min(math.isqrt((2**31 - 1) // terms), 2**14 - 1)


def rounds(h: PatchHeads) -> bool:
    """Whether these kernels take such heads."""
    return h.lanes == LANES and h.dim % 2 == 0


def _rounded(x: UOp) -> UOp:
    """The nearest integers, int32. A cast truncates."""
    return (x + 32768.5).cast(I32) - 32768


@functools.cache
def round_queries(h: PatchHeads) -> KernelFunction:
    """Rounds the queries of a chunk, or its keys, if these have the heads. Buffers: int16 (heads, tiles, dim / 2,
    lanes, 2), pairs of dimensions; their scales, float32 (heads, tiles, lanes); the queries as `split_heads` makes
    them; the tiles of a picture, int32 (1,); the state."""
    lanes, dim = h.lanes, h.dim
    most = most_rounded(dim)

    def kernel(part: UOp, parts: UOp, out: UOp, scales: UOp, source: UOp, tiles: UOp, state: UOp) -> UOp:
        k = KernelBuilder(lanes)
        tasks = Tasks(k, h.heads, tiles, state, part, parts)
        with k.loop(tasks.count) as i:
            tile = tasks.tile(i)
            largest = k.registers(lanes)
            k.fill(largest, 0, UOp.const(_LEAST, F32))
            with k.loop(dim) as d:
                x = k.vector(source, (tile * dim + d) * lanes)
                k.store(largest, 0, k.vector(largest, 0).maximum(x.maximum(x * -1.0)))
            k.store(scales, tile * lanes, k.vector(largest, 0) * (1 / most))
            inverse = k.vector(largest, 0).reciprocal() * float(most)
            with k.loop(dim // 2) as pair:
                both = [
                    _rounded(k.vector(source, (tile * dim + pair * 2 + e) * lanes) * inverse)
                    for e in range(2)
                ]
                at = (tile * (dim // 2) + pair) * (2 * lanes)
                k.store(out, at, k.interleave(*both).cast(I16))
        return k.finish(f"round_queries_{dim}")

    return kernel


@functools.cache
def round_values(h: PatchHeads) -> KernelFunction:
    """Rounds the values of a chunk. Buffers: int16 (heads of keys, tiles, lanes / 2, padded_dim, 2), pairs of keys;
    their scales, float32 (heads of keys, tiles, lanes); the values as `split_heads` makes them; the tiles of a picture,
    int32 (1,); the state."""
    lanes, padded = h.lanes, h.padded_dim
    most = most_rounded(lanes)

    def kernel(part: UOp, parts: UOp, out: UOp, scales: UOp, source: UOp, tiles: UOp, state: UOp) -> UOp:
        k = KernelBuilder(lanes)
        tasks = Tasks(k, h.kv_heads, tiles, state, part, parts)
        inverses = k.registers(lanes)
        with k.loop(tasks.count) as i:
            tile = tasks.tile(i)
            with k.loop(lanes) as token:
                largest = k.registers(lanes)
                k.fill(largest, 0, UOp.const(_LEAST, F32))
                with k.loop(padded // lanes) as j:
                    x = k.vector(source, (tile * lanes + token) * padded + j * lanes)
                    k.store(largest, 0, k.vector(largest, 0).maximum(x.maximum(x * -1.0)))
                top = k.across(k.vector(largest, 0), Ops.MAX)
                k.store(scales, tile * lanes + token, top * (1 / most))
                k.store(inverses, token, top.reciprocal() * float(most))
            with k.loop(lanes // 2) as pair, k.loop(padded // lanes) as j:
                both = [
                    _rounded(
                        k.vector(source, (tile * lanes + pair * 2 + e) * padded + j * lanes)
                        * k.load(inverses, pair * 2 + e)
                    )
                    for e in range(2)
                ]
                at = ((tile * (lanes // 2) + pair) * padded + j * lanes) * 2
                k.store(out, at, k.interleave(*both).cast(I16))
        return k.finish(f"round_values_{padded}")

    return kernel


def _dots(
    k: KernelBuilder, left: UOp, at: Index, right: UOp, at_right: Index, stride: int, pairs: int, n: int
) -> list[UOp]:
    """n sums of products of pairs of 16-bit integers: of a vector of each pair from `at` on, and of n neighbouring
    pairs of numbers from `at_right` on, which are `stride` numbers further for each pair. int32 (lanes,) each."""
    two_vectors = 2 * k.lanes
    sums = [k.zeros(two_vectors, I32) for _ in range(-(-n // 2))]  # two side by side
    with k.loop(pairs) as pair:
        values = [k.vector(s, 0, two_vectors) for s in sums]
        vector = k.vector(left, at + pair * two_vectors, two_vectors)
        for two in range(len(sums)):
            ends = (
                k.multiply_pair(vector, k.vector(right, at_right + pair * stride + (2 * two + e) * 2, 2))
                for e in range(2)
            )
            values[two] = values[two] + k.concat(*ends)
        for s, value in zip(sums, values, strict=True):
            k.store(s, 0, value)
    return [k.vector(sums[i // 2], i % 2 * k.lanes) for i in range(n)]


@functools.cache
def attend_rounded(h: PatchHeads, windowed: bool = False) -> KernelFunction:
    """Attention of a chunk's queries. Buffers: out, float32 (rows, width); scratch: scores, float32 (parts, tiles,
    lanes, lanes), weights, int16 (parts, tiles, lanes / 2, lanes, 2), and their scales, float32 (parts, tiles,
    lanes); queries and keys as `round_queries` makes them, values of `round_values`, and the scales of the three;
    what hides keys, float32 (tiles * lanes,): 0, or a large negative number; the tiles of a picture's queries and of
    its keys, int32 (2,); the state; if `windowed`, the windows (`KeyTiles`)."""
    lanes, dim, padded = h.lanes, h.dim, h.padded_dim
    most = most_rounded(lanes)

    def kernel(
        part: UOp, parts: UOp, out: UOp, scores: UOp, weights: UOp, weight_scales: UOp, q16: UOp, k16: UOp, v16: UOp,
        q_scales: UOp, k_scales: UOp, v_scales: UOp, hidden: UOp, shape: UOp, state: UOp, *windows: UOp,
    ) -> UOp:  # fmt: skip
        k = KernelBuilder(lanes)
        for buffer in scores, weights, weight_scales:
            k.scratch(buffer)
        tiles, all_keys, in_chunk = k.index(shape, 0), k.index(shape, 1), k.index(state, TILES)
        base = part * all_keys
        first, count = even_share(in_chunk * h.heads, part, parts)

        with k.loop(count) as n:
            task = first + n  # the tiles of a head one after the other, so that its keys stay in the cache
            head, tile = task // in_chunk, task % in_chunk
            own = k.index(state, FIRST) // lanes + tile
            queries, key_tiles = head * tiles + own, KeyTiles(k, all_keys, own, windows)
            first_key = head // h.sharing * all_keys
            largest, totals = k.registers(lanes), k.registers(lanes)
            k.fill(largest, 0, UOp.const(_MASKED, F32))
            k.fill(totals, 0, UOp.const(0.0, F32))
            scale = k.vector(q_scales, queries * lanes)
            with k.loop(key_tiles.count) as i:
                block = key_tiles.first + i
                of_keys = first_key + block
                ints = _dots(
                    k, q16, queries * (dim * lanes), k16, of_keys * (dim * lanes), 2 * lanes, dim // 2, lanes
                )
                top = k.vector(largest, 0)
                for t, dot in enumerate(ints):
                    score = dot.cast(F32) * (scale * k.load(k_scales, of_keys * lanes + t))
                    score = key_tiles.hide(score + k.load(hidden, block * lanes + t), block, key=t)
                    k.store(scores, ((base + i) * lanes + t) * lanes, score)
                    top = top.maximum(score)
                k.store(largest, 0, top)
            peak = k.vector(largest, 0) * -1.0
            with k.loop(key_tiles.count) as i:
                block = key_tiles.first + i
                tops, at = k.registers(lanes), (base + i) * (lanes * lanes)
                k.fill(tops, 0, UOp.const(_LEAST, F32))
                with k.loop(lanes) as t:
                    share = k.exp(k.vector(scores, at + t * lanes) + peak)
                    k.store(totals, 0, k.vector(totals, 0) + share)
                    weight = share * k.load(v_scales, (first_key + block) * lanes + t)
                    k.store(scores, at + t * lanes, weight)
                    k.store(tops, 0, k.vector(tops, 0).maximum(weight))
                k.store(weight_scales, (base + i) * lanes, k.vector(tops, 0) * (1 / most))
                inverse = k.vector(tops, 0).reciprocal() * float(most)
                with k.loop(lanes // 2) as pair:
                    both = [
                        _rounded(k.vector(scores, at + (pair * 2 + e) * lanes) * inverse) for e in range(2)
                    ]
                    k.store(weights, at + pair * (2 * lanes), k.interleave(*both).cast(I16))
            inverse = k.vector(totals, 0).reciprocal()

            def weighted(column: UOp | int, n: int) -> None:
                """n columns of the result."""
                sums = [k.zeros() for _ in range(n)]
                with k.loop(key_tiles.count) as i:
                    pairs = (first_key + key_tiles.first + i) * (lanes // 2) * padded + column
                    at = (base + i) * (lanes * lanes)
                    ints = _dots(k, weights, at, v16, pairs * 2, 2 * padded, lanes // 2, n)
                    scale = k.vector(weight_scales, (base + i) * lanes)
                    for s, dot in zip(sums, ints, strict=True):
                        k.store(s, 0, k.vector(s, 0) + dot.cast(F32) * scale)
                for e, s in enumerate(sums):
                    at = tile * lanes * h.width + head * dim + column + e
                    k.store_elements(out, at, h.width, k.vector(s, 0) * inverse)

            h.by_vectors(k, weighted)
        return k.finish(f"attend_rounded_{h.heads}_{dim}")

    return kernel
