"""The cached keys and values as decode attention on tensor cores takes them, in each format of the cache.

Thread 4g + t of a warp loads, of sixteen tokens at a time, keys of tokens 2g and 2g + 1, and values of tokens 4t to
4t + 3. It gets the scores of the tokens 4t to 4t + 3 and the query head g.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tinygrad import UOp

from engine.formats.kv_format import QUANT_BLOCK, KVFormat
from engine.targets.nvidia.kernels.attention import quantized_cache as quantized
from engine.targets.nvidia.kernels.attention.decode_block import DecodeBlock
from engine.targets.nvidia.kernels.attention.half_cache import words_of
from engine.targets.nvidia.kernels.attention.kv_cache import TILE
from engine.targets.nvidia.kernels.half_words import halves, product, word_of
from engine.targets.nvidia.kernels.products.matmul import wmma
from engine.targets.nvidia.kernels.uops import F16, F32, f32, load_run

_ENLARGED = 256.0  # weights times scales are enlarged, for small values would be too small for float16

Loads = list[list[UOp]]
"""Words for each array of registers."""


Run = tuple[UOp, int]
"""Dimensions: the first, and how many."""


class Fragments(ABC):
    """A layer's cache in a kernel, for runs of the dimensions of `keys` and of `values`."""

    def __init__(self, block: DecodeBlock, g: UOp, t: UOp, keys: Run, values: Run) -> None:
        self._block, self._g, self._t, self._keys = block, g, t, keys
        self._first, self._width = values
        self.n_sums = self._width // 4  # registers of the weighted sums of values

    @abstractmethod
    def keys(self, step: UOp) -> Loads:
        """Loads a thread's part of the keys of a step."""

    @abstractmethod
    def values(self, step: UOp) -> Loads:
        """The same of the values."""

    @abstractmethod
    def scores(self, queries: Sequence[list[UOp]], keys: Loads) -> list[UOp]:
        """The scores of four tokens. `queries`: left tiles of sixteen dimensions."""

    @abstractmethod
    def add(self, weights: Sequence[UOp], values: Loads, sums: Sequence[UOp]) -> list[UOp]:
        """The sums after four tokens with these weights."""

    @abstractmethod
    def results(self, sums: Sequence[UOp], t: UOp) -> list[tuple[UOp, UOp]]:
        """The weighted sums of values of a thread: (dimension, sum)."""


def fragments(block: DecodeBlock, g: UOp, t: UOp, keys: Run, values: Run) -> Fragments:
    """The fragments for the format of the block's cache, and for runs of the dimensions of keys and of values."""
    return _KINDS[block.heads.kv_format](block, g, t, keys, values)


def tile_of(block: DecodeBlock, step: UOp) -> tuple[UOp, UOp]:
    """The tile of a step of a block's tokens, and whether there is one."""
    return block.pages.tile(block.kv, block.start // TILE + step), step * TILE < block.count


class _HalfFragments(Fragments):
    """float16. A load is of four dimensions of two keys, or of two dimensions of four values."""

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

    def scores(self, queries: Sequence[list[UOp]], keys: Loads) -> list[UOp]:
        (words,), acc = keys, [[f32(0)] * 4 for _ in (0, 1)]
        for c, query in enumerate(queries):
            for token in (0, 1):
                acc[token] = wmma(
                    query, [x for word in words[c * 4 + token * 2 :][:2] for x in halves(word)], acc[token]
                )
        return [acc[k % 2][k // 2] for k in range(4)]

    def add(self, weights: Sequence[UOp], values: Loads, sums: Sequence[UOp]) -> list[UOp]:
        (words,), result = values, list[UOp]()
        lefts = _lefts(weights, [None] * 4)
        for c in range(self._width // 16):
            result += _added(lefts, [halves(word) for word in words[c * 4 :][:4]], sums[4 * c :][:4])
        return result

    def results(self, sums: Sequence[UOp], t: UOp) -> list[tuple[UOp, UOp]]:
        places = ((i // 4 * 16 + i % 2 * 2 + i % 4 // 2, x) for i, x in enumerate(sums[: self.n_sums]))
        return [(t * 4 + d, x) for d, x in places]


class _QuantizedFragments(Fragments):
    """q8_0 (`quantized_cache`). The scales of keys multiply the scores of their blocks, those of values the weights of
    tokens."""

    def keys(self, step: UOp) -> Loads:
        h, (tile, ok) = self._block.heads, tile_of(self._block, step)
        first_block, n = self._keys[0] // QUANT_BLOCK, self._keys[1] // QUANT_BLOCK
        firsts = (quantized.key_words(h, tile, first_block + i, self._t, self._g) for i in range(n))
        words = [x for first in firsts for x in load_run(self._block.cache[0], first, 4, ok)]
        return [words, self._scales(2, step, first_block, n)]

    def values(self, step: UOp) -> Loads:
        h, (tile, ok) = self._block.heads, tile_of(self._block, step)
        quad, n = self._first // 4 + self._g, self._width // QUANT_BLOCK
        firsts = (quantized.value_words(h, tile, quad + i * 8, self._t) for i in range(n))
        words = [x for first in firsts for x in load_run(self._block.cache[1], first, 4, ok)]
        return [words, self._scales(3, step, self._first // QUANT_BLOCK, n)]

    def _scales(self, plane: int, step: UOp, first: UOp | int, n: int) -> list[UOp]:
        """The scales of n blocks, two in a word. Beyond the tokens they are those of the cache's first tile, which are
        finite: loads that may be left out would take more instructions."""
        tile, ok = tile_of(self._block, step)
        index = quantized.scales(self._block.heads, ok.where(tile, 0), self._t) + first * 4
        loads = load_run(self._block.cache[plane], index, n * 4)
        return [word_of(*loads[i : i + 2]) for i in range(0, n * 4, 2)]

    def scores(self, queries: Sequence[list[UOp]], keys: Loads) -> list[UOp]:
        words, scales = keys
        scores: list[UOp] = []
        for i in range(len(queries) // 2):
            acc = [[f32(0)] * 4 for _ in (0, 1)]
            for half in (0, 1):
                for token in (0, 1):
                    right = quantized.integers_of(words[i * 4 + token * 2 + half])
                    acc[token] = wmma(queries[2 * i + half], right, acc[token])
            of_tokens = [x.cast(F32) for word in scales[2 * i : 2 * i + 2] for x in halves(word)]
            parts = [acc[k % 2][k // 2] * of_tokens[k] for k in range(4)]
            scores = [x + y for x, y in zip(scores, parts, strict=True)] if scores else parts
        return scores

    def add(self, weights: Sequence[UOp], values: Loads, sums: Sequence[UOp]) -> list[UOp]:
        (words, scales), enlarged, result = values, [w * f32(_ENLARGED) for w in weights], list[UOp]()
        for i in range(self._width // QUANT_BLOCK):
            lefts = _lefts(enlarged, [x for word in scales[2 * i : 2 * i + 2] for x in halves(word)])
            quads = [quantized.integers_of(word) for word in words[4 * i : 4 * i + 4]]
            for j in (0, 1):
                pairs = [quad[2 * j : 2 * j + 2] for quad in quads]
                result += _added(lefts, pairs, sums[(i * 2 + j) * 4 :][:4])
        return result

    def results(self, sums: Sequence[UOp], t: UOp) -> list[tuple[UOp, UOp]]:
        places = (i // 8 * QUANT_BLOCK + i % 2 * 4 + i // 4 % 2 * 2 + i % 4 // 2 for i in range(self.n_sums))
        return [(t * 8 + d, x * f32(1 / _ENLARGED)) for d, x in zip(places, sums, strict=False)]


_KINDS: dict[KVFormat, type[Fragments]] = {KVFormat.F16: _HalfFragments, KVFormat.Q8_0: _QuantizedFragments}


def upper_rows(four: Sequence[UOp]) -> list[UOp]:
    """A thread's elements of a left tile of tensor cores, from its four elements of row g; those of row g + 8 are
    zeros."""
    zeros, four = [f32(0).cast(F16)] * 2, _float16(four)
    return [*four[:2], *zeros, *four[2:], *zeros]


def _float16(values: Sequence[UOp]) -> list[UOp]:
    return [x.cast(F16) for x in values]


def _lefts(weights: Sequence[UOp], scales: Sequence[UOp | None]) -> list[list[UOp]]:
    """Two left tiles, of eight tokens each, from a thread's weights of four and their scales. Columns 2t and 2t + 1 are
    the same token: row g has its weight in the first, row g + 8 in the second."""
    zero, rows = f32(0).cast(F16), list[list[UOp]]()
    for weight, scale in zip(_float16(weights), scales, strict=True):
        pairs = [weight, zero], [zero, weight]
        rows.append([x for pair in pairs for x in (pair if scale is None else product(pair, [scale] * 2))])
    return [rows[k] + rows[k + 1] for k in (0, 2)]


def _added(lefts: Sequence[list[UOp]], pairs: Sequence[list[UOp]], sums: Sequence[UOp]) -> list[UOp]:
    """Row g and row g + 8 of sums, of two dimensions, with the values of four tokens in both."""
    acc = list(sums)
    for k, left in enumerate(lefts):
        acc = wmma(left, pairs[2 * k] + pairs[2 * k + 1], acc)
    return acc
