"""Attention of all patches of a picture to all, or to those of their window, on tensor cores: one pass over the keys.

A warp has queries of a head and goes over the keys, some at a time: a step. Queries, keys and values lie in memory as
threads hold operands of tensor cores (`patches.operand_index`), so a thread loads sixteen bytes at a time. The warps of
a block read the same keys and values at about the same time, and find them in the multiprocessor's own cache. What
happens in a step, `attention_sums` says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.attention.attention_sums import LEAST_TOTAL, AttentionSums, step_scores
from engine.targets.nvidia.kernels.device import spills_early
from engine.targets.nvidia.kernels.pictures.patches import PatchHeads, clamped
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.matmul import as_half, fragment_index
from engine.targets.nvidia.kernels.uops import LOWEST, f32, finish, load_run, store


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
def attend_patches(
    heads: PatchHeads, size: int, tiling: PatchTiling, clamps: bool = False, window: int = 0
) -> Kernel:
    """Buffers: out, float16 fragments (size, heads * dim), within clamp, float32 (2,), if it `clamps`; operands, those
    of `rotate_patches`; windows, if a `window` has up to so many patches, of each patch the first one of its window and
    the one after the last, int32 (size, 2); count, the number of patches."""
    h, rows, steps = heads, tiling.rows, tiling.steps
    chunks, span = h.padded // 16, 16 * steps
    blocks = -(-size // (16 * rows * tiling.warps))

    def kernel(out: UOp, operands: UOp, clamp: UOp | None, windows: UOp | None, count: UOp) -> UOp:
        thread, warp = UOp.special(32, "lidx0"), UOp.special(tiling.warps, "lidx1")
        block, head = UOp.special(blocks, "gidx0"), UOp.special(h.count, "gidx1")
        g, t, n = thread // 4, thread % 4, used_rows(count, size)
        tile = (block * tiling.warps + warp) * rows
        live = tile * 16 < n
        n_steps, whole = live.where((n + (span - 1)) // span, 0), live.where(n // span, 0)
        passes = [(UOp.const(0), whole), (whole, n_steps)]  # in the last one, keys may be hidden
        # The first key that each of a thread's rows of queries sees, and the end.
        seen = [(UOp.const(0), n)] * (2 * rows)
        if windows is not None:
            begin, end = (
                _window(windows, tile * 16, n)[0] // span,
                _window(windows, (tile + rows) * 16 - 1, n)[1],
            )
            passes = [(begin, live.where((end + (span - 1)) // span, begin))]
            seen = [_window(windows, (tile + i // 2) * 16 + g + 8 * (i % 2), n) for i in range(2 * rows)]

        def operand(which: int, tile: UOp, c: int) -> list[UOp]:
            first = which * h.size(size) + ((head * (size // 16) + tile) * chunks + c) * 256
            return load_run(operands, first + thread * 8, 8)

        last = size // 16 - 1
        own = [(tile + r).minimum(last) for r in range(rows)]
        queries = [operand(0, own[r], c) for r in range(rows) for c in range(chunks)]
        running = AttentionSums(rows, steps, chunks, 0)

        def halves(which: int, step: UOp, s: int, c: int) -> list[list[UOp]]:
            eight = operand(which, step * steps + s, c)
            return [eight[:4], eight[4:]]

        def shown(step: UOp, is_last: bool, s: int, i: int, four: list[UOp]) -> list[UOp]:
            if not is_last:
                return four
            keys, (low, high) = [(step * steps + s) * 16 + t * 4 + e for e in range(4)], seen[i]
            ok = [key < high if windows is None else (key >= low) & (key < high) for key in keys]
            return [own.where(x, f32(LOWEST)) for own, x in zip(ok, four, strict=True)]

        done: tuple[UOp, ...] = ()
        for axis, (start, stop) in enumerate(passes):
            loop = UOp.range(stop - start, axis, AxisType.LOOP)
            step, before = start + loop, (loop, *done)
            old, hide = running.largest(*before), functools.partial(shown, step, axis + 1 == len(passes))
            scores = step_scores(queries, functools.partial(halves, 1, step), rows, steps, chunks, hide)
            stores, _ = running.added(scores, old, functools.partial(halves, 2, step), g, t, *before)
            done = (UOp.group(*stores).end(loop),)

        sums, total, _ = running.ends(*done)
        stores = []
        for r in range(rows):
            factors = [x.maximum(LEAST_TOTAL).reciprocal() for x in total[2 * r : 2 * r + 2]]
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
        shape = f"{rows}_{tiling.warps}_{steps}" + "_windows" * bool(window)
        n_ops = 4 * size * (window or size) * h.count * h.dim
        return finish(f"patch_attend_{h.count}_{h.dim}_{size}_{shape}", stores, 0, n_ops)

    return Kernel(kernel, ("out",), ("operands", clamps and "clamp", window > 0 and "windows", "count"))


def _window(windows: UOp, row: UOp, n: UOp) -> tuple[UOp, UOp]:
    """The first patch of the window of a row, and the one after the last. Rows after the n-th count as the last one."""
    first, end = load_run(windows, row.minimum(n - 1).maximum(0) * 2, 2)
    return first, end
