"""Rotary position embedding of queries and keys, and the layout of the KV cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from engine.formats.kv_format import QUANT_BLOCK
from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sum_of_squares
from engine.targets.cpu.kernels.kernel_builder import F16, F32, I8, I32, Index, KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import n_tokens, position_of, sequence_of


@dataclass(frozen=True)
class HeadLanes:
    """The attention heads of a kind of layers: `query` heads share `kv` heads of keys and values, of `dim` elements
    each. Scores are multiplied by `scale`, and capped by `softcap` if that is not 0. `query_norm` and `key_norm`:
    whether these are RMS-normed, with `norm_eps`. `norms_over_heads`: over all heads together. If it `rotates_first`,
    the weights of the norms are of rotated elements. `temperature`: whether queries are multiplied by a factor of their
    position. `sinks`: each query head has a score that joins those of the keys, unscaled, and whose value is zero.
    `stored`: without values of their own, the keys before norm and rotation are the values; with nothing, the cache is
    that of another layer. `value_norm`: values are RMS-normed over a head. With `own_norms`, each head has weights of
    its own, and `layer_norms` take the mean off a head, too. `limit`: what queries, keys and values are cut to, 0 if
    they are not. `slopes`: what falls off the score of a query head by the distance of the tokens is in a buffer.
    `turns_tokens`: the tables of angles are by the tokens of the step, not by position. `ahead`: in prompts, a query
    sees up to so many tokens after its own; if it goes `both_ways`, with a window no more than before its own.

    With a `window`, a query at position p sees the keys from p - window + 1 to p; 0 is no window. If windows are
    `chunked`, it sees those from the last multiple of the window on. The cache of a layer is in blocks of `block`
    tokens, a multiple of `lanes`. Its rows, each of a head and a token, are (kv, blocks, block): keys (rows / lanes,
    dim, lanes) and values (rows, dim) of type `dtype`. If this is int8, the format is q8_0
    (`engine.formats.kv_format`), and keys and values have scales as well, float16 (rows / lanes, dim / 32, lanes) each.

    Tables say what block holds each `block` tokens of a sequence, int32 (2 + sequences * entries,): the first two
    elements are the number of entries of a sequence, and that of the cache's blocks. So one kernel serves
    caches of all lengths."""

    query: int
    kv: int
    dim: int
    block: int
    lanes: int
    scale: float
    norm_eps: float = 0.0
    query_norm: bool = False
    key_norm: bool = False
    temperature: bool = False
    window: int = 0
    dtype: DType = F16
    norms_over_heads: bool = False
    sinks: bool = False
    stored: Literal["keys and values", "keys", "nothing"] = "keys and values"
    value_norm: bool = False
    softcap: float = 0.0
    turns_tokens: bool = False
    ahead: int = 0
    both_ways: bool = False
    rotates_first: bool = False
    chunked: bool = False
    own_norms: bool = False
    layer_norms: bool = False
    limit: float = 0.0
    slopes: bool = False

    @property
    def rows(self) -> int:
        """Elements of a token's queries, keys and values together, of those that it has."""
        stored = {"keys and values": 2, "keys": 1, "nothing": 0}[self.stored]
        return (self.query + stored * self.kv) * self.dim

    @property
    def is_quantized(self) -> bool:
        return self.dtype is I8

    def cached(self, blocks: int) -> list[tuple[int, DType]]:
        """The elements and the types of the buffers of a layer's cache of so many blocks: keys, values, and the scales
        of both if there are any."""
        size = blocks * self.kv * self.block * self.dim
        scales = [(size // QUANT_BLOCK, F16)] * 2 if self.is_quantized else []
        return [(size, self.dtype)] * 2 + scales

    def row(self, k: KernelBuilder, tables: UOp, sequence: Index, head: Index, position: Index) -> Index:
        """The row of a head's key and value of a token."""
        block = k.index(tables, 2 + sequence * n_entries(k, tables) + position // self.block)
        return (head * k.index(tables, 1) + block) * self.block + position % self.block

    def key_index(self, row: Index, d: Index) -> Index:
        """The index of element d of the first key of the `lanes` that the row is one of."""
        return (row // self.lanes * self.dim + d) * self.lanes

    def value_index(self, row: Index, d: Index) -> Index:
        return row * self.dim + d

    def scale_index(self, row: Index, group: Index) -> Index:
        """The index of the scale of the group-th 32 elements of the first key or value of these `lanes`."""
        return (row // self.lanes * (self.dim // QUANT_BLOCK) + group) * self.lanes


def n_entries(k: KernelBuilder, tables: UOp) -> UOp:
    """The entries of a sequence in the tables (`HeadLanes`)."""
    return k.index(tables, 0)


@functools.cache
def rotate(heads: HeadLanes, tile: int) -> KernelFunction:
    """Norms and rotates queries and keys, and stores keys and values in the cache. Buffers: the queries, float32
    (tokens, query * dim), multiplied by `scale`; the layer's cache (`HeadLanes.cached`) and the tables of the
    sequences, if it stores something; the state if tile is more than 1; the tokens' places; the products' rows, float32
    (tokens, heads.rows): queries, keys, values; cos and sin of the angles, float32 (positions, dim / 2) each, or
    (tokens, dim / 2); of the queries' norm and of the keys' the weights, float32 (dim,) or of all heads, if there is
    one; the temperatures, float32 (positions,), if there are any."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        return _Rotation(heads, tile, part, parts, buffers).build()

    return kernel


class _Rotation:
    """The kernel of `rotate` under construction. It works on `n` elements of a half of a head at once."""

    def __init__(self, heads: HeadLanes, tile: int, part: UOp, parts: UOp, buffers: Sequence[UOp]) -> None:
        h = self.heads = heads
        self.tile, self.part, self.parts = tile, part, parts
        self.half, self.n = h.dim // 2, gcd(h.dim // 2, h.lanes)
        self.queries, *rest = buffers
        self.cache = [rest.pop(0) for _ in h.cached(1)] if h.stored != "nothing" else []
        self.tables = rest.pop(0) if self.cache else None
        self.state = rest.pop(0) if tile > 1 else None
        self.places, self.rows, self.cos, self.sin, *rest = rest
        self.query_norm, self.key_norm = (
            rest.pop(0) if normed else None for normed in (h.query_norm, h.key_norm)
        )
        self.temperatures = rest.pop(0) if h.temperature else None
        self.k = KernelBuilder(h.lanes)
        self.mean = self.k.registers(1)  # that of the last head, if norms take it off

    def build(self) -> UOp:
        h, k = self.heads, self.k
        key = k.registers(h.dim) if h.is_quantized and self.cache else None
        with k.loop(n_tokens(k, self.state, self.tile)) as t:
            position = position_of(k, self.places, t)
            angle: Index = t if h.turns_tokens else position
            self.store_queries(t, angle, position)
            if self.tables is not None:
                self.store_keys_and_values(t, angle, position, self.tables, key)
        return k.finish(f"rotate_{h.query}_{h.kv}_{h.dim}_{self.tile}")

    def store_queries(self, t: UOp, angle: Index, position: UOp) -> None:
        """Stores the queries of token t."""
        h, k, n = self.heads, self.k, self.n
        scale: float | UOp = h.scale
        if self.temperatures is not None:
            scale = k.load(self.temperatures, position) * h.scale
        first, count = even_share(h.query, self.part, self.parts)
        factor = (
            self.norm_factor(t * h.rows, h.query * h.dim) if h.norms_over_heads and h.query_norm else None
        )
        with k.loop(count) as i:
            head = first + i
            at = t * h.rows + head * h.dim
            if h.query_norm and not h.norms_over_heads:
                factor = self.norm_factor(at, h.dim, h.layer_norms)
            with k.loop(self.half // n) as j:
                a, b = self.rotated(at, angle, j * n, self.query_norm, factor, head)
                to = t * (h.query * h.dim) + head * h.dim + j * n
                k.store(self.queries, to, a * scale)
                k.store(self.queries, to + self.half, b * scale)

    def store_keys_and_values(
        self, t: UOp, angle: Index, position: Index, tables: UOp, key: UOp | None
    ) -> None:
        """Stores those of token t in the cache. `key`: registers for a rotated key, if the cache is quantized."""
        h, k = self.heads, self.k
        sequence = sequence_of(k, self.places, t)
        first, count = even_share(h.kv, self.part, self.parts)
        factor = None
        if h.key_norm and h.norms_over_heads:
            factor = self.norm_factor(t * h.rows + h.query * h.dim, h.kv * h.dim)
        with k.loop(count) as i:
            head = first + i
            row = h.row(k, tables, sequence, head, position)
            at = t * h.rows + (h.query + head) * h.dim
            of_values = at + h.kv * h.dim if h.stored == "keys and values" else at
            value_factor = self.norm_factor(of_values, h.dim) if h.value_norm else None
            if h.key_norm and not h.norms_over_heads:
                factor = self.norm_factor(at, h.dim, h.layer_norms)
            self.store_key(row, at, angle, factor, head, key)
            if key is None:
                self.store_value(row, of_values, value_factor)
            else:
                self.store_quantized(row, of_values, value_factor, key)

    def store_key(
        self, row: Index, at: Index, angle: Index, factor: UOp | None, head: Index, key: UOp | None
    ) -> None:
        """Stores a rotated key in the cache, or in `key`."""
        h, k, n = self.heads, self.k, self.n
        with k.loop(self.half // n) as j:
            halves = self.rotated(at, angle, j * n, self.key_norm, factor, head)
            for v, offset in zip(halves, (0, self.half), strict=True):
                if key is not None:
                    k.store(key, j * n + offset, v)
                else:
                    to = h.key_index(row, j * n + offset) + row % h.lanes
                    k.store_elements(self.cache[0], to, h.lanes, v.cast(h.dtype))

    def store_value(self, row: Index, at: Index, factor: UOp | None) -> None:
        h, k, n = self.heads, self.k, self.n
        with k.loop(h.dim // n) as j:
            v = self.value(at + j * n, n, factor)
            k.store(self.cache[1], h.value_index(row, j * n), v.cast(h.dtype))

    def store_quantized(self, row: Index, at: Index, factor: UOp | None, key: UOp) -> None:
        """Stores a `key` and a value in blocks with scales."""
        h, k = self.heads, self.k
        keys, values, key_scales, value_scales = self.cache
        with k.loop(h.dim // QUANT_BLOCK) as group:
            d = group * QUANT_BLOCK
            lane = row % h.lanes
            scale_at, to = h.scale_index(row, group) + lane, h.key_index(row, d) + lane
            units = range(0, QUANT_BLOCK, h.lanes)
            vectors = [k.vector(key, d + i) for i in units]
            _store_quantized(k, vectors, keys, to, h.lanes, key_scales, scale_at)
            vectors = [self.value(at + (d + i), h.lanes, factor) for i in units]
            _store_quantized(k, vectors, values, h.value_index(row, d), 1, value_scales, scale_at)

    def element(self, at: Index, n: int) -> UOp:
        """n elements of the products, cut to the limit."""
        v, limit = self.k.vector(self.rows, at, n), self.heads.limit
        return v.maximum(UOp.const(-limit, F32)).minimum(UOp.const(limit, F32)) if limit else v

    def value(self, at: Index, n: int, factor: UOp | None) -> UOp:
        v = self.element(at, n)
        return v if factor is None else v * self.k.load(factor, 0)

    def rotated(
        self, at: Index, angle: Index, j: UOp, weight: UOp | None, factor: UOp | None, head: Index
    ) -> tuple[UOp, UOp]:
        """n elements of a rotated head from j on, and n from j + half on."""
        h, k, n, half = self.heads, self.k, self.n, self.half
        first = head * h.dim if h.norms_over_heads or h.own_norms else 0  # of the head's weights
        a, b = (self.element(at + offset + j, n) for offset in (0, half))
        if weight is not None and h.layer_norms:
            a, b = (v - k.load(self.mean, 0) for v in (a, b))
        weights: list[UOp] = []
        if weight is not None and factor is not None:
            a, b = (v * k.load(factor, 0) for v in (a, b))
            weights = [k.vector(weight, first + (offset + j), n) for offset in (0, half)]
        if weights and not h.rotates_first:
            a, b = a * weights[0], b * weights[1]
        c, s = (k.vector(table, angle * half + j, n) for table in (self.cos, self.sin))
        turned = a * c - b * s, b * c + a * s
        return (turned[0] * weights[0], turned[1] * weights[1]) if weights and h.rotates_first else turned

    def norm_factor(self, at: Index, size: int, centres: bool = False) -> UOp:
        """One over the length of a vector; if it `centres`, without its mean, which is kept."""
        k, n = self.k, self.n
        factor, total = k.registers(1), k.zeros(n) if centres else None
        squares = sum_of_squares(k, self.rows, at, size, n) * (1.0 / size)
        if total is not None:
            with k.loop(size // n) as j:
                k.store(total, 0, k.vector(total, 0, n) + k.vector(self.rows, at + j * n, n))
            of_all = k.across(k.vector(total, 0, n), Ops.ADD) if n > 1 else k.load(total, 0)
            k.store(self.mean, 0, of_all * (1.0 / size))
            squares = squares - k.load(self.mean, 0) * k.load(self.mean, 0)
        k.store(factor, 0, (squares + self.heads.norm_eps).sqrt().reciprocal())
        return factor


def _store_quantized(
    k: KernelBuilder, vectors: Sequence[UOp], out: UOp, to: Index, stride: int, scales: UOp, scale_at: Index
) -> None:
    """Rounds 32 elements to int8, and stores them `stride` apart, and their scale."""
    magnitudes = (v.maximum(v * -1.0) for v in vectors)
    largest = k.across(functools.reduce(UOp.maximum, magnitudes), Ops.MAX)
    k.store(scales, scale_at, (largest * (1 / 127)).cast(F16))
    inverse = largest.maximum(UOp.const(1e-30, F32)).reciprocal() * 127.0
    for i, v in enumerate(vectors):
        integers = ((v * inverse + 128.5).cast(I32) - 128).cast(I8)  # a cast truncates
        if stride == 1:
            k.store(out, to + i * k.lanes, integers)
        else:
            k.store_elements(out, to + i * k.lanes * stride, stride, integers)
