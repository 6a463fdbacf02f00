"""The kernels of prefill between its matrix products: norms and activations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import STATIC_SHARED, LaunchHints
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.eights import RUN, Gathered, place_in_runs
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.products.small_batch import MAX_TOKENS
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import (
    F16,
    Activation,
    chain,
    curved,
    f32,
    finish,
    gated,
    least_counting,
    load,
    store,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT

_ROW_SLOT = 20  # of the shared memory for a token's activations


@dataclass(frozen=True)
class _Added:
    """What is added to a token's stream at the places of a thread: products, of so many `parts` each, of which the
    first `posts` are normed before."""

    norm: TokenNorm
    token: UOp
    tokens: int
    cols: int
    parts: Sequence[int]
    post_eps: float | None
    posts: int

    def _terms(self, of: UOp, n: int, column: UOp, ok: UOp | None) -> list[UOp]:
        return [load(of, (p * self.tokens + self.token) * self.cols + column, ok) for p in range(n)]

    def products(
        self, sums: Sequence[UOp], post_norms: Sequence[UOp], biases: Sequence[UOp]
    ) -> list[list[UOp]]:
        """The terms of each place."""
        places = self.norm.places
        of_biases = [[load(bias, column, ok) for bias in biases] for column, ok in places]
        added: list[list[UOp]] = [[] for _ in places] if self.posts else of_biases
        for k, (of, n) in enumerate(zip(sums, self.parts, strict=True)):
            terms = [self._terms(of, n, *place) for place in places]
            if k >= self.posts:
                added = [[*mine, *others] for others, mine in zip(added, terms, strict=True)]
                continue
            product = [chain([*a, *b]) for a, b in zip(terms, of_biases, strict=True)]
            added = self._normed(added, product, post_norms[k], k, self.post_eps)
        return added

    def with_own(self, added: Sequence[list[UOp]], values: Sequence[UOp], weight: UOp) -> list[list[UOp]]:
        """`added`, with the stream's own values, normed."""
        return self._normed(added, values, weight, self.posts)

    def _normed(
        self,
        added: Sequence[list[UOp]],
        values: Sequence[UOp],
        weight: UOp,
        number: int,
        eps: float | None = None,
    ) -> list[list[UOp]]:
        factor = self.norm.factor(values, 2 + 2 * number, eps)
        weights = [load(weight, column, ok) for column, ok in self.norm.places]
        return [[*others, v * factor * w] for others, v, w in zip(added, values, weights, strict=True)]


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
    `scaled_by`; norm, its weight, float32 (cols,); norm_bias, what is added to the result if it is `shifted`, float32
    (cols,)."""
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
            added = _Added(token_norm, token, tokens, cols, parts, post_eps, posts)
            of_products = added.products(sums, post_norms, biases)
            if own_norm is not None:
                of_products = added.with_own(of_products, values, own_norm)
            values = [chain([value, *terms]) for value, terms in zip(values, of_products, strict=True)]
            if scale is not None:
                values = [value * load(scale, 0) for value in values]
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
        of_columns = []
        for (column, ok), value in zip(places, values, strict=True):
            normed = value * factor * load(norm, column, ok)
            normed = normed if norm_bias is None else normed + load(norm_bias, column, ok)
            of_columns.append((column, normed.cast(F16) if is_normed else as_half(normed), ok))
        if order == "eights" and cols % UNIT == 0 and cols * 2 < STATIC_SHARED // 2:
            stores += _stored_in_eights(x, token, cols, token_norm, of_columns)
        else:
            stores += [store(x, PLACES[order](token, column, cols), v, ok) for column, v, ok in of_columns]
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
    is_few = order == "columns" or (order in ("eights", "halves") and tokens <= MAX_TOKENS)
    hints = LaunchHints(releases="after its wait" if is_few else "at its end")
    return Kernel(
        kernel, ("x", keeps_sizes and "sizes", "stream"), (*added, "norm", shifted and "norm_bias"), hints
    )


def _stored_in_eights(
    x: UOp, token: UOp, cols: int, norm: TokenNorm, of_columns: Sequence[tuple[UOp, UOp, UOp | None]]
) -> list[UOp]:
    """Stores a token's activations by eight tokens, 16 bytes of a thread at a time."""
    gathered, stores = Gathered(1, cols // RUN, _ROW_SLOT), list[UOp]()
    for column, value, ok in of_columns:
        stores.append(store(gathered.array, gathered.place(0, *place_in_runs(column, cols)), value, ok))
    return gathered.stores(x, cols, stores, token, 0, norm.thread, norm.threads)


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
def activate_prompt_ungated(
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
        return finish(f"prefill_ungated_{tokens}_{n}", [result])

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
