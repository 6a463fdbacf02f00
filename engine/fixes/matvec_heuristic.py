"""tinygrad 0.14.0: its heuristic schedule for matrix-vector products also matches those of language models.

The heuristic assigns a group of threads to each row of the matrix, so that they read neighbouring elements. It matches
only a sum over the product of two loads. A model's products do not look like that: a product in half precision is
inside a cast, and a dequantized weight or a normed activation is itself a product. Without a match, the kernel gets a
general schedule of 16 threads a block, which read far apart.

With this fix the match looks through a cast around the product, and finds loads behind casts and up to 3 further
multiplications. On NVIDIA GPUs each row gets 32 threads, one warp, instead of 8 (MV_THREADS_PER_ROW overrides this). On
a Jetson AGX Orin the two changes took a Llama 3.2 1B from 3.9 to 29.9 tokens/s.
"""

from __future__ import annotations

from itertools import permutations

from tinygrad.codegen.opt import KernelOptError, Opt, OptOps, heuristic
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.helpers import getenv
from tinygrad.uop.ops import AxisType, Ops, UOp

from engine.fixes import once

DEPTH = 3  # multiplications below the summed one
_stock = heuristic.hand_coded_optimizations


@once("The schedule of matrix-vector products")
def apply() -> None:
    """Changes tinygrad in this process."""
    heuristic.hand_coded_optimizations = _optimized


def _optimized(kernel: Scheduler) -> Scheduler:
    stock = _stock(kernel)
    if any(opt.op is OptOps.TC for opt in stock.applied_opts):
        return stock
    return _matvec(kernel.copy()) or stock


def _matvec(kernel: Scheduler) -> Scheduler | None:
    """The scheduled kernel, or None if it is not a matrix-vector product or its sizes are not divisible."""
    nvidia = kernel.ren.target.device in ("CUDA", "NV")
    threads = getenv("MV_THREADS_PER_ROW", 32 if nvidia else 8)
    block, rows = getenv("MV_BLOCKSIZE", 4), getenv("MV_ROWS_PER_THREAD", 4)
    sum_ = kernel.reduceop
    reduced = kernel.ranges_of(AxisType.REDUCE)
    if (
        not (kernel.ren.has_local and kernel.ren.has_shared and getenv("MV", 1) and reduced)
        or max(threads, block, rows) == 1
        or sum_ is None
        or sum_.arg[0] is not Ops.ADD
        or not _vector_and_matrix(sum_.src[0], reduced[0])
        or reduced[0].src[0].divides(threads) is None
    ):
        return None
    for axis in kernel.axes_of(AxisType.GLOBAL):
        if kernel.full_shape[axis] % (block * rows) == 0:
            try:
                if threads > 1:
                    kernel.apply_opt(Opt(OptOps.GROUP, 0, threads))
                if block > 1:
                    kernel.apply_opt(Opt(OptOps.LOCAL, axis, block))
                if rows > 1:
                    kernel.apply_opt(Opt(OptOps.UPCAST, axis, rows))
            except KernelOptError:
                return None
            return kernel
    return None


def _vector_and_matrix(product: UOp, reduced: UOp) -> bool:
    """Whether one load is indexed by `reduced`, and another by all ranges of the first: x[k] and W[n, k]."""
    indices = [load.src[1].get_idx() for load in _loads(product, DEPTH + 1)]
    return any(
        any(term is reduced for term in x.split_uop(Ops.ADD)) and all(r in w.ranges for r in x.ranges)
        for x, w in permutations(indices, 2)
    )


def _loads(value: UOp, depth: int) -> list[UOp]:
    if value.op is Ops.INDEX:
        return [value]
    if depth == 0 or value.op not in (Ops.MUL, Ops.CAST):
        return []
    return [load for source in value.src for load in _loads(source, depth - (value.op is Ops.MUL))]
