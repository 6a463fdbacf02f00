"""The first and the last kernel of a decode step: a token's embedding, and the token that comes next."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tinygrad import UOp

from engine.kernels.gpu.matvec import argmax
from engine.kernels.gpu.packing import QUARTER, UNIT, Packing, permuted, units_of
from engine.kernels.gpu.uops import I32, at, chain, f32, finish, load, load_index, shared, tree

Kernel = Callable[..., UOp]


@functools.cache
def embed(
    packing: Packing, vocab: int, cols: int, n_parts: int, copies: int, context: int, half: int
) -> Kernel:
    """Begins the residual stream with a row of the embedding. Buffers: as `Residual`'s outs (h; n_parts partial
    sums of squares; `copies` vectors for the first products); cos and sin of the position's angles (2 * half,);
    the state (token, position); the tables of cos and sin (context, half); the first norm's weight, prescaled,
    for each copy; the matrix's planes."""
    units = units_of(cols)
    quarters = UNIT // QUARTER
    assert n_parts >= quarters
    threads = min(units, 256)
    steps = -(-units // threads)

    def kernel(*buffers: UOp) -> UOp:
        h, parts, *rest = buffers
        nexts, (angles, state, cos, sin), rest = rest[:copies], rest[copies : copies + 4], rest[copies + 4 :]
        weights, planes = rest[:copies], rest[copies:]
        thread, quarter = UOp.special(threads, "lidx0"), UOp.special(quarters, "gidx0")
        token = load_index(state, 0, vocab)
        stores, squares = [], []
        for s in range(steps):
            unit = thread + s * threads
            inside = None if (s + 1) * threads <= units else unit < units
            safe = unit if inside is None else inside.where(unit, 0)
            values = packing.quarter(planes, token, units, safe, quarter)
            for j, value in enumerate(values):
                column = unit * UNIT + quarter * QUARTER + j
                ok = (
                    inside
                    if cols % UNIT == 0
                    else (column < cols if inside is None else inside & (column < cols))
                )
                stores.append(at(h, column, ok).store(value))
                for out, weight in zip(nexts, weights, strict=True):
                    stores.append(at(out, permuted(column, cols), ok).store(value * load(weight, column, ok)))
                squares.append(value * value if ok is None else ok.where(value * value, f32(0)))
        position = load_index(state, 1, context)
        for i in range(-(-half // threads)):
            k = thread + i * threads
            ok = quarter.eq(0) & (k < half)
            for table, place in ((cos, k), (sin, k + half)):
                stores.append(at(angles, place, ok).store(load(table, position * half + k, ok)))
        sums = shared(threads, slot=0)
        sums = sums.after(at(sums, thread).store(chain(squares)))
        total = tree([load(sums, i) for i in range(threads)])
        each = -(-n_parts // quarters)  # this block's: the total, then zeros
        for i in range(-(-each // threads)):
            k = thread + i * threads
            place = k * quarters + quarter
            ok = (k < each) & (place < n_parts)
            stores.append(at(parts, place, ok).store(k.eq(0).where(total, f32(0))))
        return finish(f"embed_{packing.name}_{cols}", stores)

    return kernel


@functools.cache
def next_token(n_blocks: int, context: int, threads: int = 1024) -> Kernel:
    """The best of the blocks of the last product (`Best`). Buffers: the state (token, position), which moves on
    by one; the tokens that came after each position, int32 (context,); the largest logits and their rows."""
    each = -(-n_blocks // threads)
    warps = threads // 32

    def kernel(state: UOp, history: UOp, best: UOp, best_row: UOp) -> UOp:
        thread = UOp.special(threads, "lidx0")
        mine = []
        for j in range(each):
            k = thread * each + j
            ok = k < n_blocks
            mine.append((ok.where(load(best, k, ok), f32(-3e38)), load(best_row, k, ok)))
        value, row = argmax(mine)
        for slot, width in ((0, threads), (2, 32)):
            values, rows = shared(width, slot), shared(width, slot + 1, I32)
            ok = thread < width
            store = UOp.group(at(values, thread, ok).store(value), at(rows, thread, ok).store(row))
            values, rows = values.after(store), rows.after(store)
            if slot == 0:
                ok = thread < 32
                parts = [
                    (load(values, thread * warps + k, ok), load(rows, thread * warps + k, ok))
                    for k in range(warps)
                ]
            else:
                parts = [(load(values, k), load(rows, k)) for k in range(32)]
            value, row = argmax(parts)
        first = thread.eq(0)
        position = load(state, 1)
        return finish(
            "next_token",
            [
                at(state, 0, first).store(row),
                at(state, 1, first).store(position + UOp.const(1, I32)),
                at(history, load_index(state, 1, context), first).store(row),
            ],
        )

    return kernel
