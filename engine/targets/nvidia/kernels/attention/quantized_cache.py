"""The layout of a q8_0 KV cache on GPUs, and how kernels store and load it.

An element is a byte: its integer plus 128. A word holds four neighbouring dimensions of a token, in the order 0, 2, 1,
3, so that a mask leaves two neighbouring ones as two numbers of 16 bits. Sixteen tokens are a tile, whose words lie in
the order in which the threads 4g + t of a warp load them, sixteen bytes each:

    keys     [key head, tile, block of 32 dimensions, t, g, token % 2, 2 quads]: of the tokens 2g and 2g + 1 the
             dimensions 4t to 4t + 3 of both halves of the block
    values   [key head, tile, quad of dimensions, token]: quad 8i + g of block i, of the tokens 4t to 4t + 3
    scales   [key head, tile, t, block, 4]: of the tokens 4t to 4t + 3; of the keys, and as many of the values
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp, dtypes

from engine.formats.kv_format import QUANT_BLOCK
from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads
from engine.targets.nvidia.kernels.half_words import chosen_bytes, integers, product
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    all_of,
    bitwise_or,
    f32,
    load,
    load_run,
    mask,
    maximum,
    shift,
    shift_right,
    store,
)

OFFSET = 128  # what is added to an integer
_MOST = 127.0
_ORDER = (0, 2, 1, 3)  # the byte of each dimension of a quad


def key_words(heads: Heads, tile: UOp, block: UOp | int, t: UOp, g: UOp) -> UOp:
    """The index of the four words of thread 4g + t: of each of two tokens, two quads."""
    return (((tile * (heads.dim // QUANT_BLOCK) + block) * 4 + t) * 8 + g) * 4


def value_words(heads: Heads, tile: UOp, quad: UOp, t: UOp) -> UOp:
    """The index of the four words of a quad of dimensions: of each of four tokens one."""
    return ((tile * (heads.dim // 4) + quad) * 4 + t) * 4


def scales(heads: Heads, tile: UOp, t: UOp) -> UOp:
    """The index of the scales of four tokens: four for each block."""
    return (tile * 4 + t) * (heads.dim // 8)


def store_quad(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp, block: Sequence[UOp],
    own: Sequence[UOp], valid: UOp | None,
) -> list[UOp]:  # fmt: skip
    """See `engine.targets.nvidia.kernels.attention.cache_tiles.Storage`. The first quad of a block stores the scale."""
    largest = maximum([x for e in block for x in (e, e * f32(-1))])
    inverse = (largest > f32(0)).where(f32(_MOST) / largest, f32(0))
    whole = [(x * inverse + f32(OFFSET + 0.5)).cast(dtypes.uint32) for x in own]
    word = bitwise_or([shift(x, -8 * byte) for x, byte in zip(whole, _ORDER, strict=True)])
    index, scale = _places(heads, which, tile, token, quad)
    return [
        store(cache[which], index, word, valid),
        store(cache[2 + which], scale, (largest * f32(1 / _MOST)).cast(F16), all_of(valid, (quad % 8).eq(0))),
    ]


def load_quad(heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp) -> list[UOp]:
    """See `engine.targets.nvidia.kernels.attention.cache_tiles.Storage`."""
    integers, scale = load_integers(heads, cache, which, tile, token, quad)
    return [x.cast(F32) * scale.cast(F32) for x in integers]


def load_integers(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp
) -> tuple[list[UOp], UOp]:
    """The integers of a quad of dimensions, int32, and the scale of its block, float16."""
    index, scale = _places(heads, which, tile, token, quad)
    word = load(cache[which], index)
    integers = [mask(shift(word, 8 * byte), 0xFF).cast(dtypes.int32) - OFFSET for byte in _ORDER]
    return integers, load(cache[2 + which], scale)


def _places(heads: Heads, which: int, tile: UOp, token: UOp, quad: UOp) -> tuple[UOp, UOp]:
    """The indices of the word of a quad, and of the scale of its block."""
    place = token % TILE
    if which == 0:
        first = key_words(heads, tile, quad // 8, quad % 4, place // 2)
        index = first + place % 2 * 2 + quad % 8 // 4
    else:
        index = value_words(heads, tile, quad, place // 4) + place % 4
    return index, scales(heads, tile, place // 4) + quad // 8 * 4 + place % 4


def eight_keys(heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp) -> list[UOp]:
    """Eight float16: the dimensions 16 * chunk + 4t to 4t + 3 of a tile's tokens 2g and 2g + 1."""
    words = key_words(heads, tile, chunk // 2, t, g) + chunk % 2
    scale = scales(heads, tile, g // 2) + chunk // 2 * 4 + g % 2 * 2
    result = []
    for token in (0, 1):
        four, factors = integers_of(load(cache[0], words + 2 * token)), [load(cache[2], scale + token)] * 2
        result += product(four[:2], factors) + product(four[2:], factors)
    return result


def eight_values(heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp) -> list[UOp]:
    """Eight float16: of the tokens 4t to 4t + 3 of a tile the dimension 16 * chunk + 2g, then the one after it."""
    words = load_run(cache[1], value_words(heads, tile, chunk * 4 + g // 2, t), 4)
    of_tokens = load_run(cache[3], scales(heads, tile, t) + chunk // 2 * 4, 4)
    own = [shift_right(word, g % 2 * 8) for word in words]  # its bytes 0 and 2
    dimensions = list[list[UOp]]([[], []])
    for k in (0, 2):
        four = integers(chosen_bytes(own[k], own[k + 1], (0, 4, 2, 6)), range(4), OFFSET)
        for d, two in zip(dimensions, (four[:2], four[2:]), strict=True):
            d += product(two, of_tokens[k : k + 2])
    return [x for d in dimensions for x in d]


def integers_of(word: UOp) -> list[UOp]:
    """The four integers of a word, float16."""
    return integers(word, _ORDER, OFFSET)
