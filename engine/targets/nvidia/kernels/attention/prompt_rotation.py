"""Queries and keys of prompts, from the QKV product to attention: norms, rotary embeddings, gates, and the cache.

A thread has eight elements of a head: four neighbours, and those that are rotated with them. So it loads sixteen bytes
at a time, has whole quads of the cache, and loads an angle once for two elements. It has them of two tokens, whose
queries are neighbours in memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.angles import angle_row
from engine.targets.nvidia.kernels.attention.cache_tiles import STORAGES
from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads, Pages
from engine.targets.nvidia.kernels.attention.prefill_attention import query_index
from engine.targets.nvidia.kernels.pieces import Piece
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.uops import (
    F16,
    after_store,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_run,
    shared,
    store,
    store_run,
    tree,
)

_THREADS = 256  # of a block, at most
_SLOTS = 4  # of shared memory, for each token
_QUAD = 4
_APART = 8  # rows: the tokens of a thread, whose queries are neighbours

Eight = list[UOp]
"""Elements of a head: a quad of its first half, and that of the same angles in its second half."""


@functools.cache
def norms_over_heads(
    heads: Heads, tokens: int, parts: tuple[int, ...], sizes: tuple[int, ...], has_bias: bool
) -> Kernel:
    """The factors of RMS norms over all heads of a token's queries, and over all heads of its keys. Buffers:
    factors, float32 (tokens, 2); sums, those of each run of the QKV product, as in `rotate_prompt`; bias, float32, if
    it `has_bias`."""
    h, threads = heads, 256
    runs, sizes_of_norms = (
        Runs(tokens, parts, sizes, limit=heads.limit),
        (heads.query * heads.dim, heads.kv * heads.dim),
    )

    def kernel(factors: UOp, sums: Sequence[UOp], bias: UOp | None) -> UOp:
        thread, token, which = (
            UOp.special(threads, "lidx0"),
            UOp.special(tokens, "gidx0"),
            UOp.special(2, "gidx1"),
        )
        is_query = which.eq(0)
        start, size = is_query.where(0, sizes_of_norms[0]), is_query.where(*sizes_of_norms)
        places = [thread + i * threads for i in range(-(-max(sizes_of_norms) // threads))]
        values = [runs.load(sums, bias, token, start + place, place < size) for place in places]
        partial = after_store(shared(threads, slot=0), thread, chain(value * value for value in values))
        k = UOp.range(threads // 32, 0, AxisType.REDUCE)
        total = tree(load_run(partial, k * 32, 32)).reduce(k, arg=Ops.ADD)
        mean = total * is_query.where(*(f32(1 / n) for n in sizes_of_norms))
        result = store(factors, token * 2 + which, inverse_rms(mean, 1, h.norm_eps or 0.0), thread.eq(0))
        return finish(f"prefill_wide_norms_{h.name}_{tokens}", [result])

    return Kernel(kernel, ("factors",), (("sums", len(sizes)), has_bias and "bias"))


class _Head(NamedTuple):
    """A head of queries, of keys or of values, and whose elements a thread has: it is the `thread`-th of the head's, of
    the block's `place`-th head. `d`: the first element of each quad."""

    number: UOp
    place: UOp
    thread: UOp
    d: tuple[UOp, UOp]
    is_query: UOp
    is_key: UOp
    is_value: UOp


@dataclass(frozen=True)
class _Token:
    """A token in a row of the step, and whether it has one. `slot`: the first of its shared memory."""

    row: UOp
    position: UOp
    is_there: UOp
    slot: int


class _Block:
    """A block of `rotate_prompt`: some heads of two tokens."""

    def __init__(self, heads: Heads, tokens: int, prompt: UOp) -> None:
        h, self.heads, self.tokens, self.prompt = heads, heads, tokens, prompt
        assert h.dim % 8 == 0 and tokens % (2 * _APART) == 0
        self.threads, self.total = h.dim // 8, (h.rows - h.first_row) // h.dim
        blocks = -(-self.total // max(1, _THREADS // self.threads))
        self.per_block = -(-self.total // blocks)
        thread, place = UOp.special(self.threads, "lidx0"), UOp.special(self.per_block, "lidx1")
        pair, block = UOp.special(tokens // 2, "gidx0"), UOp.special(blocks, "gidx1")
        number, d = block * self.per_block + place, thread * _QUAD
        self.exists = number < self.total
        is_query, is_key = number < h.query, (number >= h.query) & (number < h.query + h.kv)
        is_value = is_key if h.stored == "keys" else number >= h.query + h.kv
        self.head = _Head(number, place, thread, (d, d + h.dim // 2), is_query, is_key, is_value)
        first = pair // _APART * (2 * _APART) + pair % _APART
        self.piece = piece = Piece.of(prompt, first, tokens, h.length)
        self.own = []
        for k, row in enumerate((first, first + _APART)):
            token = piece.token(row)
            position = (piece.position + token).minimum(h.length - 1)
            self.own.append(_Token(row, position, self.exists & (token < piece.count), 4 + _SLOTS * k))

    def load(self, runs: Runs, sums: Sequence[UOp], bias: UOp | None, token: _Token) -> Eight:
        """A thread's elements of a product's rows."""
        row = self.head.number * self.heads.dim + self.heads.first_row
        return [
            x for d in self.head.d for x in runs.load_run(sums, bias, token.row, row + d, _QUAD, self.exists)
        ]

    def total_of(self, values: Sequence[UOp], slot: int) -> UOp:
        """The sum of the values that the threads of the head have."""
        first = self.head.place * self.threads
        partial = shared(self.per_block * self.threads, slot)
        return tree(
            load_run(after_store(partial, first + self.head.thread, chain(values)), first, self.threads)
        )

    def normed(
        self, x: Eight, norms: UOp | None, factors: UOp | None, token: _Token
    ) -> tuple[Eight, Eight, Eight | None]:
        """Elements after the norm of the model: none, one over all heads, whose `factors` are known, or one of each
        head. What is to be rotated, the elements as values, and weights of the norm that come after the rotation."""
        if norms is None:
            return x, x, None
        if factors is not None:
            return self._normed_over_heads(x, norms, factors, token), x, None
        return self._normed_by_head(x, norms, token)

    def _normed_by_head(self, x: Eight, norms: UOp, token: _Token) -> tuple[Eight, Eight, Eight | None]:
        h, head = self.heads, self.head
        if h.centred:
            mean = self.total_of(x, token.slot + 1) * f32(1 / h.dim)
            x = [head.is_value.where(v, v - mean) for v in x]
        norm = inverse_rms(self.total_of([v * v for v in x], token.slot), h.dim, h.norm_eps or 0.0)
        is_turned = head.is_query | head.is_key
        first = is_turned.where(head.number * h.dim, UOp.const(0))
        of_quads = (h.norm_place(first, head.is_key | head.is_value, d) for d in head.d)
        weights = [weight for place in of_quads for weight in load_run(norms, place, _QUAD, is_turned)]
        values = [v * norm for v in x] if h.normed_values else x
        if h.rotates_first:
            return [v * norm for v in x], values, weights
        return [v * weight * norm for v, weight in zip(x, weights, strict=True)], values, None

    def _normed_over_heads(self, x: Eight, norms: UOp, factors: UOp, token: _Token) -> Eight:
        head, is_turned = self.head, self.head.is_query | self.head.is_key
        norm = load(factors, token.row * 2 + head.is_query.where(UOp.const(0), UOp.const(1)))
        of_quads = (load_run(norms, head.number * self.heads.dim + d, _QUAD, is_turned) for d in head.d)
        return [v * weight * norm for v, weight in zip(x, itertools.chain(*of_quads), strict=True)]

    def rotated(self, x: Eight, cos: UOp, sin: UOp, token: _Token) -> Eight:
        """Elements after rotary position embedding."""
        half, table = (
            self.heads.dim // 2,
            (self.heads.length, token.position, self.prompt, self.piece.sequence_at),
        )
        place = angle_row(cos, half, *table) * half + self.head.d[0]
        turns = [*zip(load_run(cos, place, _QUAD), load_run(sin, place, _QUAD), strict=True)]
        first = [a * c - b * s for a, b, (c, s) in zip(x[:_QUAD], x[_QUAD:], turns, strict=True)]
        return first + [b * c + a * s for a, b, (c, s) in zip(x[:_QUAD], x[_QUAD:], turns, strict=True)]

    def query_stores(self, queries: UOp, of_tokens: Sequence[Eight]) -> list[UOp]:
        """Stores the queries of both tokens; zeros of the second one, if only the first is there."""
        (first, second), stores = self.own, list[UOp]()
        for q, d in enumerate(self.head.d):
            a, b = (z[q * _QUAD : (q + 1) * _QUAD] for z in of_tokens)
            b = [second.is_there.where(x, f32(0)) for x in b]
            place = query_index(self.heads, self.tokens, self.head.number, first.row, d)
            stores += store_run(
                queries, place, [*a[:2], *b[:2], *a[2:], *b[2:]], first.is_there & self.head.is_query
            )
        return stores

    def gate_stores(
        self, gates: UOp, order: Order, runs: Runs, sums: Sequence[UOp], token: _Token
    ) -> list[UOp]:
        """Stores what a token's results of attention are multiplied by."""
        h, head, stores = self.heads, self.head, list[UOp]()
        for d in head.d:
            row, column = h.gate_row(head.number.minimum(h.query - 1) * h.dim + d), head.number * h.dim + d
            n = _QUAD if h.gates == h.dim else 1
            own = runs.load_run(sums, None, token.row, row, n, head.is_query) * (_QUAD // n)
            for e, gate in enumerate(own):
                place = PLACES[order](token.row, column + e, h.query * h.dim)
                stores.append(store(gates, place, h.opened(gate).cast(F16), token.is_there & head.is_query))
        return stores

    def cache_stores(
        self, cache: Sequence[UOp], tables: UOp, z: Eight, values: Eight, token: _Token
    ) -> list[UOp]:
        """Stores a token's rotated keys, or its values."""
        h, head, storage = self.heads, self.head, STORAGES[self.heads.kv_format]
        kv = head.is_key.where(
            head.number - h.query, (head.number - (h.query + h.kv)).maximum(0).minimum(h.kv - 1)
        )
        tile = Pages.of(h, tables, self.prompt, self.piece.sequence_at).tile(kv, token.position // TILE)
        kept = [[head.is_key.where(a, b) for a, b in zip(z, values, strict=True)]]
        if h.stored == "keys":  # each is a value too, as it was before it was rotated
            kept = [z, values]
        quads = [self._quads(x, token.slot + 2 + k) for k, x in enumerate(kept)]
        stores = list[UOp]()
        for which, is_kind in enumerate((head.is_key, head.is_value)):
            for d, (own, of_block) in zip(head.d, quads[which % len(quads)], strict=True):
                place = which, tile, token.position, d // _QUAD
                stores += storage.store_quad(h, cache, *place, of_block, own, token.is_there & is_kind)
        return stores

    def _quads(self, x: Eight, slot: int) -> list[tuple[list[UOp], list[UOp]]]:
        """Each quad of elements, and those of its block, if the format of the cache has blocks."""
        own, n, first = (x[:_QUAD], x[_QUAD:]), self.heads.kv_format.block, self.head.place * self.heads.dim
        if not n:
            return [(quad, []) for quad in own]
        array = shared(self.per_block * self.heads.dim, slot)
        stores = [store_run(array, first + d, quad) for d, quad in zip(self.head.d, own, strict=True)]
        array = array.after(UOp.group(*itertools.chain(*stores)))
        blocks = (load_run(array, first + d // n * n, n) for d in self.head.d)
        return [*zip(own, blocks, strict=True)]


@functools.cache
def rotate_prompt(
    heads: Heads, tokens: int, parts: tuple[int, ...], sizes: tuple[int, ...], has_bias: bool, over_heads: bool = False,
    order: Order = "fragments",
) -> Kernel:  # fmt: skip
    """Rotates the queries and keys of prompts, and norms them if the model does; stores keys and values in the cache.
    The QKV product comes in runs of `sizes` rows, each as partial sums, float32 (parts, tokens, size). Buffers:
    queries, float16 (see `query_index`); of gated heads gates, what each element of the result is multiplied by, as
    activations of the last product in an `Order`, for `attend_prompt`; cache (`Heads.cache_planes`); sums, those of
    each run; cos and sin, their tables, float32 (context, dim / 2) (`angle_row`); tables, those of blocks, int32
    (sequences, `Heads.table_size`); prompt, the step's state (`pieces`); bias, float32, if it `has_bias`; norms, the
    weights of the queries' and the keys' norm, float32 (2, dim), if there are norms, or if they are `over_heads`,
    float32 (query + kv, dim), and factors, those of `norms_over_heads`; temperature, the factors of queries by
    position, float32 (context,), if there are any. If the cache is another layer's, there are only queries, and neither
    a cache nor tables of blocks."""
    h, stores_tokens = heads, heads.stored != "nothing"
    runs = Runs(tokens, parts, sizes, limit=h.limit)

    def kernel(
        queries: UOp, gates: UOp | None, cache: Sequence[UOp], sums: Sequence[UOp], cos: UOp, sin: UOp,
        tables: UOp | None, prompt: UOp, bias: UOp | None, norms: UOp | None, factors: UOp | None,
        temperature: UOp | None,
    ) -> UOp:  # fmt: skip
        block, stores, of_tokens = _Block(h, tokens, prompt), list[UOp](), list[Eight]()
        for token in block.own:
            x = block.load(runs, sums, bias, token)
            x, values, weights = block.normed(x, norms, factors, token)
            z = block.rotated(x, cos, sin, token)
            z = [a * weight for a, weight in zip(z, weights, strict=True)] if weights else z
            factor = f32(h.query_scale)
            if temperature is not None:
                factor = factor * load(temperature, token.position, token.is_there & block.head.is_query)
            of_tokens.append([a * factor for a in z])
            if gates is not None:
                stores += block.gate_stores(gates, order, runs, sums, token)
            if tables is not None:
                stores += block.cache_stores(cache, tables, z, values, token)
        stores += block.query_stores(queries, of_tokens)
        return finish(f"prefill_rotate_{h.name}_{tokens}", stores)

    outputs = "queries", h.gated and "gates", ("cache", len(h.cache_planes) if stores_tokens else 0)
    return Kernel(
        kernel,
        outputs,
        (
            ("sums", len(sizes)),
            "cos",
            "sin",
            stores_tokens and "tables",
            "prompt",
            has_bias and "bias",
            h.norm_eps is not None and "norms",
            over_heads and "factors",
            h.temperature and "temperature",
        ),
    )
