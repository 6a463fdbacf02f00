"""The kernels that only models with a draft head have: they begin its residual stream, let the first row of a step go
on, and leave what steps of the model make of tokens for the host."""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import I32, INDEX, chain, finish, load, load_index, store


@functools.cache
def add_sums(tokens: int, cols: int, parts: tuple[int, int]) -> Kernel:
    """The sum of two products. Buffers: out, float32 (tokens, cols); first and second, the products' partial sums,
    float32 (parts, tokens, cols)."""
    threads = 256

    def kernel(out: UOp, first: UOp, second: UOp) -> UOp:
        column = UOp.special(-(-cols // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        token, ok = UOp.special(tokens, "gidx1"), None if cols % threads == 0 else column < cols
        terms = [
            load(sums, (p * tokens + token) * cols + column, ok)
            for sums, count in zip((first, second), parts, strict=True)
            for p in range(count)
        ]
        name = f"add_sums_{tokens}_{cols}_{parts[0]}_{parts[1]}"
        return finish(name, [store(out, token * cols + column, chain(terms), ok)])

    return Kernel(kernel, ("out",), ("first", "second"))


@functools.cache
def normed_row(cols: int, eps: float) -> Kernel:
    """The RMS norm of the first row. Buffers: out and rows, float32 (rows, cols); norm, its weight, float32 (cols,)."""

    def kernel(out: UOp, rows: UOp, norm: UOp) -> UOp:
        token_norm = TokenNorm(cols, eps)
        values = [load(rows, column, ok) for column, ok in token_norm.places]
        factor = token_norm.factor(values, 0)
        stores = [
            store(out, column, value * factor * load(norm, column, ok), ok)
            for (column, ok), value in zip(token_norm.places, values, strict=True)
        ]
        return finish(f"normed_row_{cols}", stores)

    return Kernel(kernel, ("out",), ("rows", "norm"))


@functools.cache
def copy_hidden(count: int, cols: int) -> Kernel:
    """Leaves the residual stream of a step of `count` rows for the host. Buffers: out, float32 (2 * count, cols): as
    the next tokens are (`StepRows.token_slot`, of one row too), so that a step leaves those of the step before;
    stream, float32 (count, cols); state, that of the step (`StepRows`)."""
    threads = 256

    def kernel(out: UOp, stream: UOp, state: UOp) -> UOp:
        column = UOp.special(-(-cols // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        row = UOp.special(count, "gidx1") if count > 1 else UOp.const(0, INDEX)
        ok = None if cols % threads == 0 else column < cols
        place = load_index(state, row + count, MAX_POSITION) % 2 * count + row
        value = load(stream, row * cols + column, ok)
        return finish(f"copy_hidden_{count}_{cols}", [store(out, place * cols + column, value, ok)])

    return Kernel(kernel, ("out",), ("stream", "state"))


@functools.cache
def first_goes_on(rows: int) -> Kernel:
    """Leaves the first row of a step alone in its state (`StepRows`), for the next step. Buffers: state."""

    def kernel(state: UOp) -> UOp:
        row = UOp.special(rows, "lidx0")
        return finish(f"first_goes_on_{rows}", [store(state, 3 * rows + row, UOp.const(0, I32), row > 0)])

    return Kernel(kernel, ("state",), ())
