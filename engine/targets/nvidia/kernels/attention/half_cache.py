"""The layout of a float16 KV cache on GPUs, and how kernels store and load it.

A word holds two neighbouring dimensions of a token. A tile of sixteen tokens is

    keys     [16 dimensions, t, g, token % 2, 2 words]: the dimensions 4t to 4t + 3 of the tokens 2g and 2g + 1
    values   [16 dimensions, t, g, 4 tokens]: the dimensions 2g and 2g + 1 of the tokens 4t to 4t + 3

so that the four words of a t (of 4) and g (of 8) are a thread's operands of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp

from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads
from engine.targets.nvidia.kernels.half_words import halves, word_of
from engine.targets.nvidia.kernels.uops import F16, F32, load, load_run, store


def words_of(heads: Heads, tile: UOp, chunk: UOp | int, t: UOp, g: UOp) -> UOp:
    """The index of four words in the sixteen dimensions `chunk` of a tile (`Heads.tile`)."""
    return (((tile * heads.chunks + chunk) * 4 + t) * 8 + g) * 4


def store_quad(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp, block: Sequence[UOp],
    own: Sequence[UOp], valid: UOp | None,
) -> list[UOp]:  # fmt: skip
    """See `engine.targets.nvidia.kernels.attention.cache_tiles.Storage`."""
    words = [word_of(*(x.cast(F16) for x in own[i : i + 2])) for i in (0, 2)]
    places = _quad_words(heads, which, tile, token, quad)
    return [store(cache[which], place, word, valid) for place, word in zip(places, words, strict=True)]


def load_quad(heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp) -> list[UOp]:
    """See `engine.targets.nvidia.kernels.attention.cache_tiles.Storage`."""
    places = _quad_words(heads, which, tile, token, quad)
    return [x.cast(F32) for place in places for x in halves(load(cache[which], place))]


def eight_keys(heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp) -> list[UOp]:
    """See `engine.targets.nvidia.kernels.attention.cache_tiles.Storage`. Threads 8t + g load neighbouring bytes."""
    return [x for word in load_run(cache[0], words_of(heads, tile, chunk, t, g), 4) for x in halves(word)]


def eight_values(heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp) -> list[UOp]:
    """See `engine.targets.nvidia.kernels.attention.cache_tiles.Storage`."""
    words = load_run(cache[1], words_of(heads, tile, chunk, t, g), 4)
    return [x for two in zip(*map(halves, words), strict=True) for x in two]


def _quad_words(heads: Heads, which: int, tile: UOp, token: UOp, quad: UOp) -> tuple[UOp, UOp]:
    """The indices of the two words of a quad of dimensions."""
    place = token % TILE
    if which == 0:
        first = words_of(heads, tile, quad // 4, quad % 4, place // 2) + place % 2 * 2
        return first, first + 1
    first = words_of(heads, tile, quad // 4, place // 4, quad % 4 * 2) + place % 4
    return first, first + 4
