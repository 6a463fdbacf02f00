"""Queries and keys of prompts, from the QKV product to attention: norms, rotary embeddings, gates, and the cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.angles import angle_row
from engine.targets.nvidia.kernels.attention.cache_tiles import store_quad
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
    rotated,
    shared,
    store,
    tree,
)

_MANY_TOKENS, _IN_TURN = 256, 4  # from so many tokens on, so many
_SLOTS = 8  # of a head


def heads_in_turn(tokens: int) -> int:
    """Of how many heads a thread of `rotate_prompt` had better have elements, for which it looks up its token once."""
    return _IN_TURN if tokens >= _MANY_TOKENS else 1


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


class _Normed(NamedTuple):
    """An element to rotate and its partner, the element as a value, and the weight of the norm, if that comes after the
    rotation."""

    x: UOp
    partner: UOp
    value: UOp
    weight: UOp | None


class _HeadRow(NamedTuple):
    """What a thread has of a head: element `d` and its partner half a head away (`own`, `partner`), of `head`, which is
    the block's `place`-th of `heads` at a time. `slot`: the first of the shared memory for these. A head is one of
    queries, of keys or of values."""

    head: UOp
    place: UOp
    heads: int
    slot: int
    d: UOp
    partner_d: UOp
    own: UOp
    partner: UOp
    is_query: UOp
    is_key: UOp
    is_value: UOp

    def total(self, value: UOp, dim: int, slot: int) -> UOp:
        """The sum of the values that the threads of the head have. Takes its `slot` and the one three after that."""
        slot += self.slot
        values = after_store(shared(self.heads * dim, slot), self.place * dim + self.d, value)
        lanes = max(16, dim // 16)  # that add, so that no thread adds the values of a whole head
        first, adds = self.place * dim + self.d, self.d < lanes
        lane_sum = tree([load(values, first + j, adds) for j in range(0, dim, lanes)])
        lane_sums = shared(self.heads * lanes, slot + 3)
        lane_sums = after_store(lane_sums, self.place * lanes + self.d, lane_sum, adds)
        return tree(load_run(lane_sums, self.place * lanes, lanes))


def _normed(h: Heads, row: _HeadRow, norms: UOp | None, factors: UOp | None, token: UOp) -> _Normed:
    """A row after the norm of the model: none, one over all heads, whose `factors` are known, or one of each head."""
    if norms is None:
        return _Normed(row.own, row.partner, row.own, None)
    if factors is not None:
        return _normed_over_heads(h, row, norms, factors, token)
    return _normed_by_head(h, row, norms)


def _normed_by_head(h: Heads, row: _HeadRow, norms: UOp) -> _Normed:
    dim, own, partner = h.dim, row.own, row.partner
    if h.centred:
        mean = row.total(own, dim, 4) * f32(1 / dim)
        own, partner = (row.is_value.where(v, v - mean) for v in (own, partner))
    norm = inverse_rms(row.total(own * own, dim, 0), dim, h.norm_eps or 0.0)
    is_turned = row.is_query | row.is_key
    first = is_turned.where(row.head * dim, UOp.const(0))
    own_weight, partner_weight = (
        load(norms, h.norm_place(first, row.is_key | row.is_value, e), is_turned)
        for e in (row.d, row.partner_d)
    )
    value = own * norm if h.normed_values else own
    if h.rotates_first:
        return _Normed(own * norm, partner * norm, value, own_weight)
    return _Normed(own * own_weight * norm, partner * partner_weight * norm, value, None)


def _normed_over_heads(h: Heads, row: _HeadRow, norms: UOp, factors: UOp, token: UOp) -> _Normed:
    norm = load(factors, token * 2 + row.is_query.where(UOp.const(0), UOp.const(1)))
    weights = (load(norms, row.head * h.dim + e, row.is_query | row.is_key) for e in (row.d, row.partner_d))
    x, other = (v * weight * norm for v, weight in zip((row.own, row.partner), weights, strict=True))
    return _Normed(x, other, row.own, None)


def _store_in_cache(
    h: Heads, cache: Sequence[UOp], pages: Pages, row: _HeadRow, position: UOp, live: UOp, z: UOp, value: UOp
) -> list[UOp]:
    """The stores of a head's rotated key `z`, or of its `value`, of the token at `position`."""
    kv = row.is_key.where(row.head - h.query, (row.head - (h.query + h.kv)).maximum(0).minimum(h.kv - 1))
    first, quad, stored = row.place * h.dim, row.d.minimum(h.dim // 4 - 1), live & (row.d < h.dim // 4)

    def gathered(slot: int, x: UOp) -> UOp:
        return after_store(shared(row.heads * h.dim, row.slot + slot), first + row.d, x)

    kept = [gathered(1, row.is_key.where(z, value))] * 2
    if h.stored == "keys":  # each is a value too, as it was before it was rotated
        kept = [gathered(1, z), gathered(2, value)]
    tile = pages.tile(kv, position // TILE)
    return [
        one
        for which, ok in enumerate((row.is_key, row.is_value))
        for one in store_quad(h, cache, which, tile, position, quad, kept[which], first, stored & ok)
    ]


@functools.cache
def rotate_prompt(
    heads: Heads, tokens: int, parts: tuple[int, ...], sizes: tuple[int, ...], has_bias: bool, over_heads: bool = False,
    order: Order = "fragments", in_turn: int = 1,
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
    a cache nor tables of blocks. A thread has elements of `in_turn` heads (`heads_in_turn`)."""
    h, dim, half, stores_tokens = heads, heads.dim, heads.dim // 2, heads.stored != "nothing"
    total = (h.rows - h.first_row) // dim
    per_block = max(1, 256 // dim)  # heads in a block at a time
    blocks, runs = -(-total // (per_block * in_turn)), Runs(tokens, parts, sizes, limit=h.limit)

    def kernel(
        queries: UOp, gates: UOp | None, cache: Sequence[UOp], sums: Sequence[UOp], cos: UOp, sin: UOp,
        tables: UOp | None, prompt: UOp, bias: UOp | None, norms: UOp | None, factors: UOp | None,
        temperature: UOp | None,
    ) -> UOp:  # fmt: skip
        d, head_in_block = UOp.special(dim, "lidx0"), UOp.special(per_block, "lidx1")
        token, block = UOp.special(tokens, "gidx0"), UOp.special(blocks, "gidx1")
        piece = Piece.of(prompt, token, tokens, h.length)
        position = (piece.position + piece.token(token)).minimum(h.length - 1)
        partner_d = (d < half).where(d + half, d - half)
        angle = angle_row(cos, half, h.length, position, prompt, piece.sequence_at) * half + d % half
        turn = load(cos, angle), load(sin, angle)

        def of_head(k: int) -> list[UOp]:
            """The stores of the k-th head of a thread; none if all blocks' are beyond the last one."""
            slot, head = _SLOTS * k, (block * in_turn + k) * per_block + head_in_block
            if head.vmin >= total:
                return []
            inside = head < total
            live = inside & (piece.token(token) < piece.count)
            row = head * dim + h.first_row
            own, partner = (runs.load(sums, bias, token, row + e, inside) for e in (d, partner_d))
            is_query, is_key = head < h.query, (head >= h.query) & (head < h.query + h.kv)
            kinds = is_query, is_key, is_key if h.stored == "keys" else head >= h.query + h.kv
            head_row = _HeadRow(head, head_in_block, per_block, slot, d, partner_d, own, partner, *kinds)
            normed = _normed(h, head_row, norms, factors, token)
            z = rotated(normed.x, normed.partner, d < half, *turn)
            z = z if normed.weight is None else z * normed.weight
            factor = f32(h.query_scale)
            if temperature is not None:
                factor = factor * load(temperature, position, live & is_query)
            query = (z * factor).cast(F16)
            stores = [store(queries, query_index(h, tokens, head, token, d), query, live & is_query)]
            if gates is not None:
                row_of_gate = h.gate_row(head.minimum(h.query - 1) * dim + d)
                gate = h.opened(runs.load(sums, None, token, row_of_gate, is_query))
                place = PLACES[order](token, head * dim + d, h.query * dim)
                stores.append(store(gates, place, gate.cast(F16), live & is_query))
            if tables is None:
                return stores
            pages = Pages.of(h, tables, prompt, piece.sequence_at)
            return stores + _store_in_cache(h, cache, pages, head_row, position, live, z, normed.value)

        stores = [one for k in range(in_turn) for one in of_head(k)]
        return finish(f"prefill_rotate_{h.name}_{tokens}_{in_turn}", stores)

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
