"""Queries and keys of prompts, from the QKV product to attention: norms, rotary embeddings, gates, and the cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
    h, dim, half, stores_tokens = heads, heads.dim, heads.dim // 2, heads.stored != "nothing"
    total = (h.rows - h.first_row) // dim
    per_block = max(1, 256 // dim)  # heads in a block
    blocks, runs = -(-total // per_block), Runs(tokens, parts, sizes, limit=h.limit)

    def kernel(
        queries: UOp, gates: UOp | None, cache: Sequence[UOp], sums: Sequence[UOp], cos: UOp, sin: UOp,
        tables: UOp | None, prompt: UOp, bias: UOp | None, norms: UOp | None, factors: UOp | None,
        temperature: UOp | None,
    ) -> UOp:  # fmt: skip
        d, head_in_block = UOp.special(dim, "lidx0"), UOp.special(per_block, "lidx1")
        token, block = UOp.special(tokens, "gidx0"), UOp.special(blocks, "gidx1")
        head = block * per_block + head_in_block
        inside = head < total
        piece = Piece.of(prompt, token, tokens, h.length)
        position = (piece.position + piece.token(token)).minimum(h.length - 1)
        live = inside & (piece.token(token) < piece.count)

        partner_d = (d < half).where(d + half, d - half)
        row = head * dim + h.first_row
        own, partner = (runs.load(sums, bias, token, row + e, inside) for e in (d, partner_d))
        is_query, is_key = head < h.query, (head >= h.query) & (head < h.query + h.kv)
        is_value = is_key if h.stored == "keys" else head >= h.query + h.kv
        value = own
        rotated_by: UOp | None = None  # the weight of the norm, if it comes after the rotation
        if norms is not None and factors is not None:
            normed = is_query | is_key
            norm = load(factors, token * 2 + is_query.where(UOp.const(0), UOp.const(1)))
            weights = (load(norms, head * dim + e, normed) for e in (d, partner_d))
            x, other = (v * weight * norm for v, weight in zip((own, partner), weights, strict=True))
        elif norms is not None:

            def of_head(value: UOp, slot: int) -> UOp:
                """The sum of a head's values."""
                values = after_store(shared(per_block * dim, slot), head_in_block * dim + d, value)
                lanes = max(16, dim // 16)  # that add, so that no thread adds the values of a whole head
                first, adds = head_in_block * dim + d, d < lanes
                lane_sum = tree([load(values, first + j, adds) for j in range(0, dim, lanes)])
                lane_sums = shared(per_block * lanes, slot + 3)
                lane_sums = after_store(lane_sums, head_in_block * lanes + d, lane_sum, adds)
                return tree(load_run(lane_sums, head_in_block * lanes, lanes))

            if h.centred:
                mean = of_head(own, 4) * f32(1 / dim)
                own, partner = (is_value.where(v, v - mean) for v in (own, partner))
                value = own
            norm = inverse_rms(of_head(own * own, 0), dim, h.norm_eps or 0.0)
            is_turned = is_query | is_key
            row_of_norm = is_turned.where(head * dim, UOp.const(0))
            of_norms = [
                load(norms, h.norm_place(row_of_norm, is_key | is_value, e), is_turned)
                for e in (d, partner_d)
            ]
            if h.rotates_first:
                x, other = own * norm, partner * norm
                rotated_by = of_norms[0]
            else:
                x, other = own * of_norms[0] * norm, partner * of_norms[1] * norm
            value = own * norm if h.normed_values else own
        else:
            x, other = own, partner
        angle = angle_row(cos, half, h.length, position, prompt, piece.sequence_at) * half + d % half
        z = rotated(x, other, d < half, load(cos, angle), load(sin, angle))
        z = z if rotated_by is None else z * rotated_by
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
        name = f"prefill_rotate_{h.name}_{tokens}"
        if tables is None:
            return finish(name, stores)
        kv = is_key.where(head - h.query, (head - (h.query + h.kv)).maximum(0).minimum(h.kv - 1))
        row, quad, stored = head_in_block * dim, d.minimum(dim // 4 - 1), live & (d < dim // 4)
        if h.stored == "keys":
            kept = [after_store(shared(per_block * dim, slot=k), row + d, x) for k, x in ((1, z), (2, value))]
        else:
            kept = [after_store(shared(per_block * dim, slot=1), row + d, is_key.where(z, value))] * 2
        tile = Pages.of(h, tables, prompt, piece.sequence_at).tile(kv, position // TILE)
        for which, ok in enumerate((is_key, is_value)):
            stores += store_quad(h, cache, which, tile, position, quad, kept[which], row, stored & ok)
        return finish(name, stores)

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
