"""The bandwidth of reading memory, on all threads of the pool: a kernel that only adds numbers."""

from __future__ import annotations

import functools
import time

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_builder import KernelBuilder, add, even_share
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.lanes import register_lanes
from engine.targets.cpu.kernels.thread_pool import default_pool

_STREAMS = 8  # independent vector loads in flight
_PART_BYTES = 1 << 20
_SECTIONS = 8


def read_gbps(n_bytes: int, rounds: int) -> float:
    """The best rate of reading `n_bytes` of memory, in 10^9 bytes a second. `n_bytes` should exceed the caches by far.

    Each of `rounds` rounds times eight sections separately: a short measurement is more likely to run undisturbed."""
    pool, step = default_pool(), _STREAMS * register_lanes()
    steps = n_bytes // _SECTIONS // 4 // step
    data = memory.zeros(_SECTIONS * steps * step, dtypes.float32)
    memory.view(data)[:] = 1.0
    parts = max(pool.count, n_bytes // _SECTIONS // _PART_BYTES)
    section, sums = memory.zeros(2, dtypes.int32), memory.zeros(parts, dtypes.float32)
    sequence = KernelSequence(pool)
    sequence.add(_sum(register_lanes()), sums, section, data, parts=parts)
    read, best_s = sequence.compile(), float("inf")
    for i in range(rounds * _SECTIONS):
        memory.view(section)[:] = i % _SECTIONS * steps, steps
        started = time.perf_counter()
        read()
        best_s = min(best_s, time.perf_counter() - started)
        assert memory.view(sums).sum() == steps * step, "the kernel read the whole section"
    return steps * step * 4 / best_s / 1e9


@functools.cache
def _sum(lanes: int) -> KernelFunction:
    """Buffers: sums, float32 (parts,); the section's start and size in steps of `_STREAMS` vectors, int32 (2,); the
    numbers, float32."""

    def kernel(part: UOp, parts: UOp, sums: UOp, section: UOp, data: UOp) -> UOp:
        k = KernelBuilder(lanes)
        start, size = (k.index(section, i) for i in range(2))
        first, count = even_share(size, part, parts)
        totals = [k.zeros() for _ in range(_STREAMS)]
        with k.loop(count) as i:
            for s, total in enumerate(totals):
                at = ((start + first + i) * _STREAMS + s) * lanes
                k.store(total, 0, k.vector(total, 0) + k.vector(data, at))
        k.store(sums, part, k.across(add(k.vector(total, 0) for total in totals), Ops.ADD))
        return k.finish("read")

    return kernel
