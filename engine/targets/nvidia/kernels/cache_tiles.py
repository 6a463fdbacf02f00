"""How kernels store and load elements of the KV cache, in any format.

A word of a float16 cache holds two neighbouring dimensions of a token. A tile of sixteen tokens is

    keys     [16 dimensions, t, g, token % 2, 2 words]: the dimensions 4t to 4t + 3 of the tokens 2g and 2g + 1
    values   [16 dimensions, t, g, 4 tokens]: the dimensions 2g and 2g + 1 of the tokens 4t to 4t + 3

so that the four words of a t (of 4) and g (of 8) are a thread's operands of tensor cores. What q8_0 is,
`quantized_cache` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp

from engine.formats.kv_format import QUANT_BLOCK
from engine.targets.nvidia.kernels import quantized_cache
from engine.targets.nvidia.kernels.half_words import halves, word_of
from engine.targets.nvidia.kernels.kv_cache import TILE, Heads
from engine.targets.nvidia.kernels.uops import F16, load, load_run, store


def words_of(heads: Heads, tile: UOp, chunk: UOp | int, t: UOp, g: UOp) -> UOp:
    """The index of four words of a float16 cache in the sixteen dimensions `chunk` of a tile (`Heads.tile`)."""
    return (((tile * heads.chunks + chunk) * 4 + t) * 8 + g) * 4


def store_quad(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp, row: UOp, first: UOp,
    valid: UOp,
) -> list[UOp]:  # fmt: skip
    """Stores a quad of dimensions of a token's key (`which` is 0) or value (1), whose elements are in `row`, float32,
    from `first` on. The token is in a `tile` (`Heads.tile`)."""
    own = load_run(row, first + quad * 4, 4)
    if heads.kv_format.is_quantized:
        block = load_run(row, first + quad // (QUANT_BLOCK // 4) * QUANT_BLOCK, QUANT_BLOCK)
        return quantized_cache.store_quad(heads, cache, which, tile, token, quad, block, own, valid)
    return store_halves(heads, cache, which, tile, token, quad, own, valid)


def store_halves(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp, own: Sequence[UOp],
    valid: UOp | None = None,
) -> list[UOp]:  # fmt: skip
    """Stores the four elements of a quad in a float16 cache."""
    words = [word_of(*(x.cast(F16) for x in own[i : i + 2])) for i in (0, 2)]
    places = _quad_words(heads, which, tile, token, quad)
    return [store(cache[which], place, word, valid) for place, word in zip(places, words, strict=True)]


def load_halves(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp
) -> list[UOp]:
    """The four elements of a quad in a float16 cache, float16."""
    places = _quad_words(heads, which, tile, token, quad)
    return [x for place in places for x in halves(load(cache[which], place))]


def _quad_words(heads: Heads, which: int, tile: UOp, token: UOp, quad: UOp) -> tuple[UOp, UOp]:
    """The indices of the two words of a quad of dimensions."""
    place = token % TILE
    if which == 0:
        first = words_of(heads, tile, quad // 4, quad % 4, place // 2) + place % 2 * 2
        return first, first + 1
    first = words_of(heads, tile, quad // 4, place // 4, quad % 4 * 2) + place % 4
    return first, first + 4


def eight_keys(heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp) -> list[UOp]:
    """Eight float16: the dimensions 16 * chunk + 4t to 4t + 3 of the tokens 2g and 2g + 1 of a tile (`Heads.tile`).
    `cache`: the buffers (`Heads.cache_planes`). Threads 8t + g load neighbouring bytes."""
    if heads.kv_format.is_quantized:
        return quantized_cache.eight_keys(heads, cache, tile, chunk, t, g)
    return [x for word in load_run(cache[0], words_of(heads, tile, chunk, t, g), 4) for x in halves(word)]


def eight_values(heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp) -> list[UOp]:
    """Eight float16: of the tokens 4t to 4t + 3 of a tile the dimension 16 * chunk + 2g, then the one after it."""
    if heads.kv_format.is_quantized:
        return quantized_cache.eight_values(heads, cache, tile, chunk, t, g)
    words = load_run(cache[1], words_of(heads, tile, chunk, t, g), 4)
    return [x for two in zip(*map(halves, words), strict=True) for x in two]
