"""The kernels of prefill between its matrix products: norms, rotary position embedding, and activations."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints
from engine.targets.nvidia.kernels.angles import angle_row
from engine.targets.nvidia.kernels.attention.cache_tiles import store_quad
from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads, Pages
from engine.targets.nvidia.kernels.attention.prefill_attention import query_index
from engine.targets.nvidia.kernels.pieces import Piece
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.products.small_batch import MAX_TOKENS
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import (
    F16,
    Activation,
    after_store,
    chain,
    curved,
    f32,
    finish,
    gated,
    inverse_rms,
    least_counting,
    load,
    load_run,
    rotated,
    shared,
    store,
    tree,
)


@functools.cache
def norm_prompt(
    tokens: int, cols: int, parts: tuple[int, ...], eps: float, post_eps: float | None = None, n_biases: int = 0,
    order: Order = "fragments", scaled: bool = False, is_normed: bool = True, keeps_sizes: bool = False,
    centred: bool = False, shifted: bool = False, n_posts: int = 1, adds_own: bool = False, scaled_by: float = 1.0,
) -> Kernel:  # fmt: skip
    """Adds products to the residual stream, takes the mean of its elements off it if it is `centred`, and RMS-norms it
    for the next product, or only multiplies it by weights if it `is_normed` not. Buffers: x, the normed activations,
    float16 in an `Order`; sizes, if it `keeps_sizes`, what tokens were divided by, float32 (tokens,); stream, float32
    (tokens, cols); sums, the partial sums of each of `parts`, float32 (parts, tokens, cols); biases, the products',
    float32 (cols,) each; post_norms, with a `post_eps` the weights of the norms of the first `n_posts` products before
    they are added, float32 (cols,) each; own_norm, if the stream itself is normed and added too (`adds_own`), that
    norm's weight, float32 (cols,); scale, if the stream is `scaled` after that, the factor, float32 (1,), beside
    `scaled_by`; norm, its weight, float32 (cols,);
    norm_bias, what is added to the result if it is `shifted`, float32 (cols,)."""
    assert parts or not (post_eps is not None or n_biases or scaled or adds_own)
    posts = 0 if post_eps is None else n_posts
    assert not (posts and n_biases) or len(parts) == 1
    assert is_normed or not centred

    def kernel(
        x: UOp, sizes: UOp | None, stream: UOp, sums: Sequence[UOp], biases: Sequence[UOp],
        post_norms: Sequence[UOp], own_norm: UOp | None, scale: UOp | None, norm: UOp, norm_bias: UOp | None,
    ) -> UOp:  # fmt: skip
        token_norm, token = TokenNorm(cols, eps), UOp.special(tokens, "gidx0")
        places, factor = token_norm.places, f32(1)
        stores, values = [], [load(stream, token * cols + column, ok) for column, ok in places]
        if parts:

            def terms_of(of: UOp, n: int, column: UOp, ok: UOp | None) -> list[UOp]:
                return [load(of, (p * tokens + token) * cols + column, ok) for p in range(n)]

            of_biases = [[load(bias, column, ok) for bias in biases] for column, ok in places]
            added: list[list[UOp]] = [[] for _ in places] if posts else of_biases
            for k, (of, n) in enumerate(zip(sums, parts, strict=True)):
                terms = [terms_of(of, n, *place) for place in places]
                if k >= posts:
                    added = [[*mine, *others] for others, mine in zip(added, terms, strict=True)]
                    continue
                product = [chain([*a, *b]) for a, b in zip(terms, of_biases, strict=True)]
                factor = token_norm.factor(product, 2 + 2 * k, post_eps)
                weights = [load(post_norms[k], column, ok) for column, ok in places]
                for others, value, w in zip(added, product, weights, strict=True):
                    others.append(value * factor * w)
            if own_norm is not None:
                factor = token_norm.factor(values, 2 + 2 * posts)
                for others, value, (column, ok) in zip(added, values, places, strict=True):
                    others.append(value * factor * load(own_norm, column, ok))
            values = [chain([value, *terms]) for value, terms in zip(values, added, strict=True)]
            if scale is not None:
                factor = load(scale, 0)
                values = [value * factor for value in values]
            if scaled_by != 1:
                values = [value * f32(scaled_by) for value in values]
        if centred:
            values, factor = token_norm.centred(values, 0)
        elif is_normed:
            factor = token_norm.factor(values, 0)
        if parts:
            for (column, ok), value in zip(places, values, strict=True):
                stores.append(store(stream, token * cols + column, value, ok))
        if sizes is not None:
            stores.append(store(sizes, token, factor.reciprocal(), token_norm.thread.eq(0)))
        for (column, ok), value in zip(places, values, strict=True):
            normed = value * factor * load(norm, column, ok)
            normed = normed if norm_bias is None else normed + load(norm_bias, column, ok)
            normed = normed.cast(F16) if is_normed else as_half(normed)
            stores.append(store(x, PLACES[order](token, column, cols), normed, ok))
        return finish(f"prefill_norm_{tokens}_{cols}_{'_'.join(map(str, parts or [0]))}", stores)

    added = (
        ("sums", len(parts)),
        ("biases", n_biases),
        ("post_norms", posts),
        adds_own and "own_norm",
        scaled and "scale",
    )
    # The products of few tokens, which the norm leaves room for, load their first weights meanwhile. With those of
    # many, prompts of 128 tokens of Qwen3 1.7B took 7 % longer on an H200.
    is_few = order == "columns" or (order == "eights" and tokens <= MAX_TOKENS)
    hints = LaunchHints(releases="after its wait" if is_few else "at its end")
    return Kernel(
        kernel, ("x", keeps_sizes and "sizes", "stream"), (*added, "norm", shifted and "norm_bias"), hints
    )


@functools.cache
def norm_embeddings(tokens: int, cols: int, eps: float, centred: bool, shifted: bool) -> Kernel:
    """Norms the stream in place, before all sublayers, without its mean if it is `centred`. Buffers: stream, float32
    (tokens, cols); norm, the weight, float32 (cols,); norm_bias, what is added if it is `shifted`, float32 (cols,)."""

    def kernel(stream: UOp, norm: UOp, norm_bias: UOp | None) -> UOp:
        token_norm, token = TokenNorm(cols, eps), UOp.special(tokens, "gidx0")
        values, stores = [load(stream, token * cols + column, ok) for column, ok in token_norm.places], []
        values, factor = token_norm.centred(values, 0) if centred else (values, token_norm.factor(values, 0))
        for (column, ok), value in zip(token_norm.places, values, strict=True):
            normed = value * factor * load(norm, column, ok)
            normed = normed if norm_bias is None else normed + load(norm_bias, column, ok)
            stores.append(store(stream, token * cols + column, normed, ok))
        return finish(f"prefill_norm_embeddings_{tokens}_{cols}", stores)

    return Kernel(kernel, ("stream",), ("norm", shifted and "norm_bias"))


@functools.cache
def add_normed_sums(tokens: int, cols: int, parts: tuple[int, int], eps: float) -> Kernel:
    """The sum of two products, each normed before. Buffers: out, float32 (tokens, cols); first and second, the
    products' partial sums, float32 (parts, tokens, cols); first_norm and second_norm, the weights of their norms,
    float32 (cols,)."""

    def kernel(out: UOp, first: UOp, first_norm: UOp, second: UOp, second_norm: UOp) -> UOp:
        norm, token, terms = TokenNorm(cols, eps), UOp.special(tokens, "gidx0"), []
        products = (first, first_norm, parts[0]), (second, second_norm, parts[1])
        for k, (sums, weight, count) in enumerate(products):
            values = [
                chain(load(sums, (p * tokens + token) * cols + column, ok) for p in range(count))
                for column, ok in norm.places
            ]
            factor = norm.factor(values, 2 * k)
            weights = (load(weight, *place) for place in norm.places)
            terms.append([value * factor * w for value, w in zip(values, weights, strict=True)])
        stores = [
            store(out, token * cols + column, a + b, ok)
            for (column, ok), a, b in zip(norm.places, *terms, strict=True)
        ]
        return finish(f"prefill_add_normed_{tokens}_{cols}_{parts[0]}_{parts[1]}", stores)

    return Kernel(kernel, ("out",), ("first", "first_norm", "second", "second_norm"))


@functools.cache
def last_rows(runs: Runs, count: int, has_bias: bool) -> Kernel:
    """A product's results for the last `count` tokens, one after the other. Buffers: rows, float32 (count, rows);
    sums, those of each run; bias, float32 (rows,), if it `has_bias`."""
    total, threads = sum(runs.sizes), 256

    def kernel(rows: UOp, sums: Sequence[UOp], bias: UOp | None) -> UOp:
        row = UOp.special(-(-total // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        token, inside = UOp.special(count, "gidx1"), row < total
        value = runs.load(sums, bias, runs.tokens - count + token, row, inside)
        name = f"last_rows_{runs.tokens}_{count}_{'_'.join(map(str, runs.sizes + runs.parts))}"
        return finish(name, [store(rows, token * total + row, value, inside)])

    return Kernel(kernel, ("rows",), (("sums", len(runs.sizes)), has_bias and "bias"))


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


@functools.cache
def bend_prompt(
    tokens: int, n: int, parts: int, activation: Activation, has_bias: bool, order: Order,
    has_curve: bool,
) -> Kernel:  # fmt: skip
    """activation(up), of layers without gates. Buffers: out, float16 in an `Order`; up, its partial sums, float32
    (parts, tokens, n); bias, float32 (n,), if it `has_bias`; curve, if it `has_curve`, which takes the place of the
    activation: float32 (4,) (`uops.curved`)."""

    def kernel(out: UOp, up: UOp, bias: UOp | None, curve: UOp | None) -> UOp:
        column = UOp.special(-(-n // 256), "gidx0") * 256 + UOp.special(256, "lidx0")
        token = UOp.special(tokens, "gidx1")
        ok = None if n % 256 == 0 else column < n
        terms = [load(up, (p * tokens + token) * n + column, ok) for p in range(parts)]
        value = chain(terms if bias is None else [*terms, load(bias, column, ok)])
        value = as_half(gated(value, f32(1), activation) if curve is None else curved(value, curve))
        result = store(out, PLACES[order](token, column, n), value, ok)
        return finish(f"prefill_bend_{tokens}_{n}", [result])

    return Kernel(kernel, ("out",), ("up", has_bias and "bias", has_curve and "curve"))


@functools.cache
def least_gates(tokens: int, n: int, parts: int, sparsity: float) -> Kernel:
    """What gates have to exceed to count. Buffers: least, float32 (tokens,); gate, partial sums, float32 (parts,
    tokens, n)."""

    def kernel(least: UOp, gate: UOp) -> UOp:
        norm, token = TokenNorm(n, 0.0), UOp.special(tokens, "gidx0")
        values = [
            chain(load(gate, (p * tokens + token) * n + column, ok) for p in range(parts))
            for column, ok in norm.places
        ]
        mean = norm.total(values, 0) * f32(1 / n)
        squares = norm.total([value * value for value in values], 2)
        result = least_counting(mean, squares, n, sparsity)
        return finish(f"prefill_least_{tokens}_{n}", [store(least, token, result, norm.thread.eq(0))])

    return Kernel(kernel, ("least",), ("gate",))


@functools.cache
def activate_prompt(
    tokens: int, n: int, parts: tuple[int, int], activation: Activation, order: Order = "fragments",
    is_sparse: bool = False,
) -> Kernel:  # fmt: skip
    """activation(gate) * up, if the two are separate products. Buffers: out, float16 in an `Order`; gate and up,
    their partial sums, float32 (parts[0], tokens, n) and (parts[1], tokens, n); least, if gates are sparse, what of
    them does not count, float32 (tokens,)."""

    def kernel(out: UOp, gate: UOp, up: UOp, least: UOp | None) -> UOp:
        column = UOp.special(-(-n // 256), "gidx0") * 256 + UOp.special(256, "lidx0")
        token = UOp.special(tokens, "gidx1")
        ok = None if n % 256 == 0 else column < n
        a, b = (
            chain(load(sums, (p * tokens + token) * n + column, ok) for p in range(count))
            for sums, count in zip((gate, up), parts, strict=True)
        )
        a = a if least is None else (a - load(least, token)).maximum(0.0)
        result = store(out, PLACES[order](token, column, n), as_half(gated(a, b, activation)), ok)
        return finish(f"prefill_activate_{tokens}_{n}", [result])

    return Kernel(kernel, ("out",), ("gate", "up", is_sparse and "least"))
