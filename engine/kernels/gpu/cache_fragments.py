"""The cached keys and values as decode attention on tensor cores takes them, in each format of the cache.

Thread 4g + t of a warp loads, of sixteen tokens at a time, keys of tokens 2g and 2g + 1, and values of tokens 4t to
4t + 3. It gets the scores of the tokens 4t to 4t + 3 and the query head g.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from engine.formats.kv_format import QUANT_BLOCK
from engine.kernels.gpu import quantized_cache as quantized
from engine.kernels.gpu.cache_tiles import halves, words_of
from engine.kernels.gpu.decode_block import DecodeBlock
from engine.kernels.gpu.kv_cache import TILE
from engine.kernels.gpu.matmul import wmma
from engine.kernels.gpu.uops import F16, F32, bitwise_or, f32, half_registers, load_run, mask, shift, u32

_BASE, _BASE_BITS = 256.0, 0x5C005C00  # as float16, twice: bits 2 to 9 of it count ones
_ENLARGED = 256.0  # weights times scales are enlarged, for small values would be too small for float16

Loads = list[list[UOp]]
"""Numbers for each array of registers."""


class Fragments(Protocol):
    """A layer's cache in a kernel."""

    key_types: tuple[DType, ...]
    """The types of the arrays of registers that hold keys."""

    value_types: tuple[DType, ...]

    n_sums: int
    """Registers of the weighted sums of values."""

    def keys(self, step: UOp) -> Loads:
        """Loads a thread's part of the keys of a step."""
        ...

    def values(self, step: UOp) -> Loads:
        """The same of the values."""
        ...

    def prepared(self, queries: Sequence[list[UOp]]) -> list[UOp]:
        """What `scores` needs that follows from the queries: float32. `queries`: left tiles of sixteen dimensions."""
        ...

    def scores(self, queries: Sequence[list[UOp]], constants: Sequence[UOp], keys: Loads) -> list[UOp]:
        """The scores of four tokens. `constants`: of `prepared`."""
        ...

    def add(self, weights: Sequence[UOp], values: Loads, sums: Sequence[UOp]) -> list[UOp]:
        """The sums after four tokens with these weights."""
        ...

    def results(self, sums: Sequence[UOp], t: UOp) -> list[tuple[UOp, UOp]]:
        """The weighted sums of values of a thread: (dimension, sum)."""
        ...


Run = tuple[UOp, int]
"""Dimensions: the first, and how many."""


def fragments(block: DecodeBlock, g: UOp, t: UOp, keys: Run, values: Run) -> Fragments:
    """Those of the format of the block's cache, and of runs of the dimensions of keys and of values."""
    kind = _QuantizedFragments if block.heads.kv_format.is_quantized else _HalfFragments
    return kind(block, g, t, keys, values)


def tile_of(block: DecodeBlock, step: UOp) -> tuple[UOp, UOp]:
    """The tile of a step of a block's tokens, and whether there is one."""
    tile = block.heads.tile(block.kv, block.start // TILE, step, pages=block.pages)
    return tile, step * TILE < block.count


class _HalfFragments:
    """float16. A load is of four dimensions of two keys, or of two dimensions of four values."""

    def __init__(self, block: DecodeBlock, g: UOp, t: UOp, keys: Run, values: Run) -> None:
        self._block, self._g, self._t, self._keys = block, g, t, keys
        self._first, self._width = values
        self.key_types = self.value_types = (dtypes.uint32,)
        self.n_sums = self._width // 4

    def keys(self, step: UOp) -> Loads:
        first, width = self._keys
        return self._load(0, step, range(width // 16), first // 16)

    def values(self, step: UOp) -> Loads:
        return self._load(1, step, range(self._width // 16), self._first // 16)

    def _load(self, which: int, step: UOp, chunks: range, first: UOp | int = 0) -> Loads:
        tile, ok = tile_of(self._block, step)
        h, buffer = self._block.heads, self._block.cache[which]
        firsts = (words_of(h, tile, first + c, self._t, self._g) for c in chunks)
        return [[x for i in firsts for x in load_run(buffer, i, 4, ok)]]

    def prepared(self, queries: Sequence[list[UOp]]) -> list[UOp]:
        return []

    def scores(self, queries: Sequence[list[UOp]], constants: Sequence[UOp], keys: Loads) -> list[UOp]:
        (words,), acc = keys, [[f32(0)] * 4 for _ in (0, 1)]
        for c, query in enumerate(queries):
            for token in (0, 1):
                acc[token] = wmma(
                    query, [x for word in words[c * 4 + token * 2 :][:2] for x in halves(word)], acc[token]
                )
        return [acc[k % 2][k // 2] for k in range(4)]

    def add(self, weights: Sequence[UOp], values: Loads, sums: Sequence[UOp]) -> list[UOp]:
        (words,), left = values, upper_rows(weights)
        result: list[UOp] = []
        for j in range(self._width // 8):
            result += _added(
                left, [halves(word)[j % 2] for word in words[j // 2 * 4 :][:4]], sums[2 * j : 2 * j + 2]
            )
        return result

    def results(self, sums: Sequence[UOp], t: UOp) -> list[tuple[UOp, UOp]]:
        return [
            (t * 4 + (i // 4 * 16 + i % 2 * 2 + i // 2 % 2), x) for i, x in enumerate(sums[: self.n_sums])
        ]


class _QuantizedFragments:
    """q8_0 (`engine.kernels.gpu.quantized_cache`). The byte of an element, 128 + q, becomes a float16 without a
    conversion: it goes to the bits of 256. What the 384 add to a score is the same for all tokens, and what they add to
    a sum of values the same for all its dimensions: a product with tiles of constants takes it away. The scales of keys
    multiply the scores of their blocks, those of values the weights."""

    def __init__(self, block: DecodeBlock, g: UOp, t: UOp, keys: Run, values: Run) -> None:
        self._block, self._g, self._t, self._keys = block, g, t, keys
        self._first, self._width = values
        self.key_types = self.value_types = dtypes.uint32, half_registers()
        self.n_sums = self._width // 4 + self._width // QUANT_BLOCK

    def keys(self, step: UOp) -> Loads:
        h, (tile, ok) = self._block.heads, tile_of(self._block, step)
        first_block, n = self._keys[0] // QUANT_BLOCK, self._keys[1] // QUANT_BLOCK
        firsts = (quantized.key_words(h, tile, first_block + i, self._t, self._g) for i in range(n))
        words = [x for first in firsts for x in load_run(self._block.cache[0], first, 4, ok)]
        scales = quantized.scales(h, tile, self._t) + first_block * 4
        return [words, load_run(self._block.cache[2], scales, n * 4, ok)]

    def values(self, step: UOp) -> Loads:
        h, (tile, ok) = self._block.heads, tile_of(self._block, step)
        quad, n = self._first // 4 + self._g, self._width // QUANT_BLOCK
        firsts = (quantized.value_words(h, tile, quad + i * 8, self._t) for i in range(n))
        words = [x for first in firsts for x in load_run(self._block.cache[1], first, 4, ok)]
        scales = quantized.scales(h, tile, self._t) + self._first // QUANT_BLOCK * 4
        return [words, load_run(self._block.cache[3], scales, n * 4, ok)]

    def prepared(self, queries: Sequence[list[UOp]]) -> list[UOp]:
        """What the offsets add to the scores of each block, negated."""
        return [self._offset(queries[2 * i : 2 * i + 2], f32(0)) for i in range(len(queries) // 2)]

    def scores(self, queries: Sequence[list[UOp]], constants: Sequence[UOp], keys: Loads) -> list[UOp]:
        words, scales = keys
        scores: list[UOp] = []
        for i, constant in enumerate(constants):
            acc = [[constant, constant, f32(0), f32(0)] for _ in (0, 1)]
            for half in (0, 1):
                for token in (0, 1):
                    right = _bytes(words[i * 4 + token * 2 + half])
                    acc[token] = wmma(queries[2 * i + half], right, acc[token])
            parts = [acc[k % 2][k // 2] * scales[i * 4 + k].cast(F32) for k in range(4)]
            scores = [x + y for x, y in zip(scores, parts, strict=True)] if scores else parts
        return scores

    def add(self, weights: Sequence[UOp], values: Loads, sums: Sequence[UOp]) -> list[UOp]:
        (words, scales), n = values, self._width // QUANT_BLOCK
        result, offsets = list[UOp](), list(sums[n * 8 :])
        for i in range(n):
            scaled = [
                w * f32(_ENLARGED) * s.cast(F32) for w, s in zip(weights, scales[4 * i :], strict=False)
            ]
            left = upper_rows(scaled)
            for j in range(4):
                of_tokens = [_byte(word, j) for word in words[4 * i : 4 * i + 4]]
                result += _added(left, of_tokens, sums[(i * 4 + j) * 2 :][:2])
            offsets[i] = self._offset([left], offsets[i])
        return result + offsets

    def results(self, sums: Sequence[UOp], t: UOp) -> list[tuple[UOp, UOp]]:
        offsets, factor = sums[self._width // 4 :], f32(1 / _ENLARGED)
        return [
            (t * 8 + (i // 8 * QUANT_BLOCK + i % 2 * 4 + i // 2 % 4), (x + offsets[i // 8]) * factor)
            for i, x in enumerate(sums[: self._width // 4])
        ]

    def _offset(self, lefts: Sequence[list[UOp]], start: UOp) -> UOp:
        """`start` less what is added to all elements, times the sum of row g of left tiles."""
        right = [f32(-quantized.OFFSET - _BASE).cast(F16)] * 4
        for left in lefts:
            start = _added(left, right, [start, start])[0]
        return start


def upper_rows(four: Sequence[UOp]) -> list[UOp]:
    """A thread's elements of a left tile of tensor cores, from its four elements of row g; those of row g + 8 are
    zeros."""
    zeros, four = [f32(0).cast(F16)] * 2, _float16(four)
    return [*four[:2], *zeros, *four[2:], *zeros]


def _float16(values: Sequence[UOp]) -> list[UOp]:
    return [x.cast(F16) for x in values]


def _added(left: Sequence[UOp], right: Sequence[UOp], sums: Sequence[UOp]) -> list[UOp]:
    """Row g of sums + left @ right."""
    return wmma(left, right, [*sums, f32(0), f32(0)])[:2]


def _bytes(word: UOp) -> list[UOp]:
    """The four bytes of a word in the order of the dimensions, each above `_BASE`, float16."""
    return [_byte(word, j) for j in range(4)]


def _byte(word: UOp, j: int) -> UOp:
    pair = bitwise_or([mask(shift(word, j // 2 * 8 - 2), 0xFF << 2 | 0xFF << 18), u32(_BASE_BITS)])
    return mask(shift(pair, j % 2 * 16), 0xFFFF).cast(dtypes.uint16).bitcast(F16)
