"""Attention of all patches of a picture to all, on tensor cores, in one pass over the keys.

A warp has queries of a head and goes over the keys, some at a time: a step. Queries, keys and values lie in memory as
threads hold operands of tensor cores (`patches.operand_index`), so a thread loads sixteen bytes at a time. The warps of
a block read the same keys and values at about the same time, and find them in the multiprocessor's own cache. What
happens in a step is as in `prefill_attention`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.device import spills_early
from engine.targets.nvidia.kernels.matmul import as_half, fragment_index, wmma
from engine.targets.nvidia.kernels.patches import PatchHeads, clamped
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.prefill_attention import quad_maxima, quad_sums
from engine.targets.nvidia.kernels.uops import (
    F16,
    LOWEST,
    chain,
    f32,
    finish,
    load_run,
    maximum,
    registers,
    store,
    store_run,
    zeroed_registers,
)


@dataclass(frozen=True)
class PatchTiling:
    """A warp has 16 * `rows` queries, and reads 16 * `steps` keys at a time; a block has `warps` warps."""

    rows: int
    warps: int
    steps: int


def patch_tiling(heads: PatchHeads) -> PatchTiling:
    """As many queries and keys as the registers hold."""
    if heads.padded > 128:
        return PatchTiling(1, 4, 1)
    if heads.padded > 64:
        return PatchTiling(1, 4, 2) if spills_early() else PatchTiling(2, 4, 2)
    return PatchTiling(2, 4, 2 if spills_early() else 4)


@functools.cache
def attend_patches(heads: PatchHeads, size: int, tiling: PatchTiling, clamps: bool = False) -> Kernel:
    """Buffers: out, float16 fragments (size, heads * dim), within clamp, float32 (2,), if it `clamps`; operands, those
    of `rotate_patches`; count, the number of patches."""
    h, rows, steps = heads, tiling.rows, tiling.steps
    chunks, span = h.padded // 16, 16 * steps
    n_sums, blocks = rows * chunks * 8, -(-size // (16 * rows * tiling.warps))

    def kernel(out: UOp, operands: UOp, clamp: UOp | None, count: UOp) -> UOp:
        thread, warp = UOp.special(32, "lidx0"), UOp.special(tiling.warps, "lidx1")
        block, head = UOp.special(blocks, "gidx0"), UOp.special(h.count, "gidx1")
        g, t, n = thread // 4, thread % 4, used_rows(count, size)
        tile = (block * tiling.warps + warp) * rows
        live = tile * 16 < n
        n_steps, whole = live.where((n + (span - 1)) // span, 0), live.where(n // span, 0)

        def operand(which: int, tile: UOp, c: int) -> list[UOp]:
            first = which * h.size(size) + ((head * (size // 16) + tile) * chunks + c) * 256
            return load_run(operands, first + thread * 8, 8)

        last = size // 16 - 1
        own = [(tile + r).minimum(last) for r in range(rows)]
        queries = [operand(0, own[r], c) for r in range(rows) for c in range(chunks)]
        sums_array, totals = zeroed_registers(n_sums, 0), zeroed_registers(2 * rows, 1)
        tops = registers(2 * rows, 2)
        tops = tops.after(UOp.group(*store_run(tops, 0, [f32(LOWEST)] * (2 * rows))))

        def scores(step: UOp, is_last: bool) -> list[list[UOp]]:
            """For each row of queries the scores of a thread's keys: four neighbours of each sixteen."""
            result: list[list[UOp]] = [[] for _ in range(2 * rows)]
            for s in range(steps):
                acc = [[[f32(0)] * 4 for _ in (0, 1)] for _ in range(rows)]
                for c in range(chunks):
                    eight = operand(1, step * steps + s, c)
                    for odd, keys in enumerate((eight[:4], eight[4:])):
                        for r in range(rows):
                            acc[r][odd] = wmma(queries[r * chunks + c], keys, acc[r][odd])
                first = (step * steps + s) * 16 + t * 4
                for i in range(2 * rows):
                    r, side = divmod(i, 2)
                    four = [acc[r][e % 2][2 * side + e // 2] for e in range(4)]
                    if is_last:
                        four = [(first + e < n).where(x, f32(LOWEST)) for e, x in enumerate(four)]
                    result[i] += four
            return result

        done: tuple[UOp, ...] = ()
        for axis, (start, stop) in enumerate(((UOp.const(0), whole), (whole, n_steps))):
            loop = UOp.range(stop - start, axis, AxisType.LOOP)
            step, before = start + loop, (loop, *done)
            old = load_run(tops.after(*before), 0, 2 * rows)
            found, top = scores(step, axis == 1), []
            for r in range(rows):
                top += quad_maxima([maximum(x) for x in found[2 * r : 2 * r + 2]], g, t)
            top = [a.alu(Ops.MAX, b) for a, b in zip(old, top, strict=True)]
            factors = [(a - b).exp2() for a, b in zip(old, top, strict=True)]
            weights = [[(x - b).exp2() for x in row] for row, b in zip(found, top, strict=True)]
            so_far = load_run(totals.after(*before), 0, 2 * rows)
            added = [chain([x * f, *row]) for x, f, row in zip(so_far, factors, weights, strict=True)]
            stores = store_run(totals, 0, added)
            sums = load_run(sums_array.after(*before), 0, n_sums)
            sums = [x * factors[i // (chunks * 8) * 2 + i % 4 // 2] for i, x in enumerate(sums)]
            halves = [[x.cast(F16) for x in row] for row in weights]
            for s in range(steps):
                lefts = [
                    [halves[2 * r + side][4 * s + k + i] for k in (0, 2) for side in (0, 1) for i in (0, 1)]
                    for r in range(rows)
                ]
                for c in range(chunks):
                    eight = operand(2, step * steps + s, c)
                    for odd, values in enumerate((eight[:4], eight[4:])):
                        for r in range(rows):
                            k = ((r * chunks + c) * 2 + odd) * 4
                            sums[k : k + 4] = wmma(lefts[r], values, sums[k : k + 4])
            stores += store_run(sums_array, 0, sums) + store_run(tops, 0, top)
            done = (UOp.group(*stores).end(loop),)

        sums, thread_totals = (
            load_run(a.after(*done), 0, k) for a, k in ((sums_array, n_sums), (totals, 2 * rows))
        )
        stores = []
        for r in range(rows):
            factors = [x.maximum(1e-30).reciprocal() for x in quad_sums(thread_totals[2 * r : 2 * r + 2])]
            for c in range(chunks):
                for side in (0, 1):
                    row = (tile + r) * 16 + g + 8 * side
                    for e in range(4):
                        d, ok = c * 16 + t * 4 + e, live & (row < n)
                        if (c + 1) * 16 > h.dim:
                            ok = ok & (d < h.dim)
                        value = sums[((r * chunks + c) * 2 + e % 2) * 4 + 2 * side + e // 2] * factors[side]
                        place = fragment_index(row, head * h.dim + d, h.count * h.dim)
                        stores.append(store(out, place, as_half(clamped(value, clamp)), ok))
        shape = f"{rows}_{tiling.warps}_{steps}"
        n_ops = 4 * size * size * h.count * h.dim
        return finish(f"patch_attend_{h.count}_{h.dim}_{size}_{shape}", stores, 0, n_ops)

    return Kernel(kernel, ("out",), ("operands", clamps and "clamp", "count"))
