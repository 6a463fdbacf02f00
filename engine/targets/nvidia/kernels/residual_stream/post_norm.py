"""The sum of the residual stream and a product that is normed first, in decode.

A norm needs the whole product, so the product's kernel stores its rows and partial sums of their squares
(`epilogues.STORE_SQUARES`), and another kernel adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.uops import (
    after_store,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_run,
    shared,
    store,
    tree,
)
from engine.targets.nvidia.kernels.weights.weight_layout import permuted

_THREADS = 32  # of a block, one warp, so that its sums wait for no other; each has an element
_BOTH_THREADS = 128  # of a block that goes over all rows


def add_normed_blocks(n: int) -> int:
    """The blocks of `add_normed`, which each store a partial sum of squares."""
    return -(-n // _THREADS)


@functools.cache
def add_normed(
    n: int, n_norm_sums: tuple[int, ...], copies: int, eps: float, scaled: bool = False, begins: bool = False,
    factor: float = 1.0, own: tuple[int, float] | None = None,
) -> Kernel:  # fmt: skip
    """Norms products of n rows, adds them to the residual stream, and prepares the stream for the next products. If it
    `begins` the stream, that is the normed rows alone. The result is multiplied by `factor`. Buffers: the outs of
    `epilogues.add_residual` (stream, float32 (n,); squares, partial sums of them, float32 (add_normed_blocks(n),);
    `copies` permuted vectors); rows, the products, float32 (n,) each; row_squares, partial sums of their squares,
    float32, so many of each (`n_norm_sums`), other arrays than that of the outs; post_norms, the weights of their
    norms, float32 (n,); with `own`, the stream itself is normed and added, too: own_squares, so many partial sums of
    its squares, and own_norm, the weight, with that eps; scale, if the stream is `scaled` after it, the factor, float32
    (1,); norms, for each copy the next norm's weight times the input_scale, float32 (n,)."""

    def kernel(
        stream: UOp, squares: UOp, copies: Sequence[UOp], rows: Sequence[UOp], row_squares: Sequence[UOp],
        post_norms: Sequence[UOp], own_squares: UOp | None, own_norm: UOp | None, scale: UOp | None,
        norms: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        thread, block = UOp.special(_THREADS, "lidx0"), UOp.special(add_normed_blocks(n), "gidx0")
        row = block * _THREADS + thread
        ok = None if n % _THREADS == 0 else row < n
        before = f32(0) if begins else load(stream, row, ok)
        added = [load(r, row, ok) * load(w, row, ok) for r, w in zip(rows, post_norms, strict=True)]
        terms = list(zip(added, row_squares, n_norm_sums, [eps] * len(added), strict=True))
        if own and own_squares is not None and own_norm is not None:
            terms.append((before * load(own_norm, row, ok), own_squares, *own))
        stores = []
        sums = shared(_THREADS * len(terms), slot=0)
        for k, (_, parts, count, _) in enumerate(terms):
            places = [thread + i * _THREADS for i in range(-(-count // _THREADS))]
            mine = [load(parts, p, None if count % _THREADS == 0 else p < count) for p in places]
            stores.append(store(sums, k * _THREADS + thread, tree(mine)))
        sums, value = sums.after(UOp.group(*stores)), before
        for k, (term, _, _, own_eps) in enumerate(terms):
            value = value + term * inverse_rms(tree(load_run(sums, k * _THREADS, _THREADS)), n, own_eps)
        value = value if factor == 1 else value * f32(factor)
        results = _prepared(n, _THREADS, stream, squares, copies, norms, value, scale)
        name = f"{'begin' if begins else 'add'}_normed_{n}_{'_'.join(map(str, n_norm_sums))}"
        return finish(name + "_own" * (own is not None), results)

    count, has_own = len(n_norm_sums), own is not None
    inputs = (
        ("rows", count),
        ("row_squares", count),
        ("post_norms", count),
        has_own and "own_squares",
        has_own and "own_norm",
        scaled and "scale",
        ("norms", copies),
    )
    return Kernel(kernel, ("stream", "squares", ("copies", copies)), inputs)


def add_both_blocks(n: int) -> int:
    """As `add_normed_blocks`, of `add_both`."""
    return -(-n // _BOTH_THREADS)


@functools.cache
def add_both(n: int, n_norm_sums: tuple[int, int], copies: int, eps: float, scaled: bool) -> Kernel:
    """Norms two products of n rows, adds them, norms their sum, and adds that to the residual stream. Each block
    computes the sum's norm by itself. Buffers: the outs of `add_normed`, with add_both_blocks(n) partial sums; rows,
    both products, float32 (2, n); row_squares, the partial sums of the squares of the first, then of the second,
    float32 (sum(n_norm_sums),); first_norm and second_norm, the weights of their norms, float32 (n,) each; post_norm,
    that of the sum's norm, float32 (n,); scale and norms as in `add_normed`."""
    threads, quads = _BOTH_THREADS, -(-n // (4 * _BOTH_THREADS))
    assert n % 4 == 0

    def kernel(
        stream: UOp, squares: UOp, copies: Sequence[UOp], rows: UOp, row_squares: UOp, first_norm: UOp,
        second_norm: UOp, post_norm: UOp, scale: UOp | None, norms: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        weights_of = first_norm, second_norm
        thread, block = UOp.special(threads, "lidx0"), UOp.special(add_both_blocks(n), "gidx0")
        row = block * threads + thread
        ok = None if n % threads == 0 else row < n
        before, weight = load(stream, row, ok), load(post_norm, row, ok)

        def own_sum(first: int, count: int) -> UOp:
            """The sum of a thread's share of partial sums."""
            places = [thread + i * threads for i in range(-(-count // threads))]
            whole = count % threads == 0
            return tree([load(row_squares, p + first, None if whole else p < count) for p in places])

        def normed(quad: UOp, ok: UOp | None) -> list[tuple[UOp, UOp]]:
            """Four rows of both products, times their norms' weights."""
            runs = [
                (load_run(rows, quad + k * n, 4, ok), load_run(w, quad, 4, ok))
                for k, w in enumerate(weights_of)
            ]
            return list(zip(*([a * b for a, b in zip(*run, strict=True)] for run in runs), strict=True))

        places = [(thread + i * threads) * 4 for i in range(quads)]
        both = [pair for p in places for pair in normed(p, None if n % (4 * threads) == 0 else p < n)]
        own = [load(rows, row + k * n, ok) * load(w, row, ok) for k, w in enumerate(weights_of)]
        parts = shared(2 * threads, slot=0)
        stores = [
            store(parts, thread + k * threads, own_sum(k * n_norm_sums[0], count))
            for k, count in enumerate(n_norm_sums)
        ]
        parts = parts.after(UOp.group(*stores))
        factors = [inverse_rms(tree(load_run(parts, k * threads, threads)), n, eps) for k in (0, 1)]
        sums = [a * factors[0] + b * factors[1] for a, b in both]
        of_sums = after_store(shared(threads, slot=2), thread, chain(x * x for x in sums))
        factor = inverse_rms(tree(load_run(of_sums, 0, threads)), n, eps)
        value = before + (own[0] * factors[0] + own[1] * factors[1]) * factor * weight
        results = _prepared(n, threads, stream, squares, copies, norms, value, scale)
        return finish(f"add_both_{n}_{n_norm_sums[0]}_{n_norm_sums[1]}", results)

    inputs = (
        "rows",
        "row_squares",
        "first_norm",
        "second_norm",
        "post_norm",
        scaled and "scale",
        ("norms", copies),
    )
    return Kernel(kernel, ("stream", "squares", ("copies", copies)), inputs)


def _prepared(
    n: int, threads: int, stream: UOp, squares: UOp, copies: Sequence[UOp], norms: Sequence[UOp], value: UOp,
    scale: UOp | None,
) -> list[UOp]:  # fmt: skip
    """The stores of the stream's new value, of which each thread of a block has one, and of what is made of it for the
    next products (`add_normed`)."""
    thread, block = UOp.special(threads, "lidx0"), UOp.special(-(-n // threads), "gidx0")
    row = block * threads + thread
    ok = None if n % threads == 0 else row < n
    if scale is not None:
        value = value * load(scale, 0)
    square = value * value if ok is None else ok.where(value * value, f32(0))
    of_block = after_store(shared(threads, slot=1), thread, square)
    stores = [store(stream, row, value, ok)]
    stores.append(store(squares, block, tree(load_run(of_block, 0, threads)), thread.eq(0)))
    for out, weight in zip(copies, norms, strict=True):
        stores.append(store(out, permuted(row, n), value * load(weight, row, ok), ok))
    return stores
