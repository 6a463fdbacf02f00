"""Reading memory and nothing else, on all cores: what the memory gives at most."""

from __future__ import annotations

import functools
import time

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.kernels.cpu import memory
from engine.kernels.cpu.program import F32, Program, register_lanes, share
from engine.kernels.cpu.thread_pool import Kernel, all_cores

_STREAMS = 8  # vectors that are on their way at a time
_PIECE_BYTES = 1 << 20
_SECTIONS = 8


def read_gbps(n_bytes: int, rounds: int) -> float:
    """10^9 bytes a second, by the best of all eighths of some rounds over `n_bytes`, which are to exceed the
    caches by far: the less time a part takes, the sooner one is found that nothing else disturbs."""
    cores, step = all_cores(), _STREAMS * register_lanes()
    steps = n_bytes // _SECTIONS // 4 // step
    data = memory.zeros(_SECTIONS * steps * step, dtypes.float32)
    memory.view(data)[:] = 1.0
    parts = max(cores.count, n_bytes // _SECTIONS // _PIECE_BYTES)
    section, sums = memory.zeros(2, dtypes.int32), memory.zeros(parts, dtypes.float32)
    launches = cores.launches()
    launches.add(_sum(register_lanes()), sums, section, data, parts=parts)
    walk, best_s = launches.captured(), float("inf")
    for i in range(rounds * _SECTIONS):
        memory.view(section)[:] = i % _SECTIONS * steps, steps
        started = time.perf_counter()
        walk()
        best_s = min(best_s, time.perf_counter() - started)
        assert memory.view(sums).sum() == steps * step, "all of it was read"
    return steps * step * 4 / best_s / 1e9


@functools.cache
def _sum(lanes: int) -> Kernel:
    """Buffers: sums, float32 (parts,); where to begin and how much to read, in 8 vectors, int32; the numbers,
    float32."""

    def kernel(part: UOp, parts: UOp, sums: UOp, section: UOp, data: UOp) -> UOp:
        k = Program(lanes)
        start, size = (k.index(section, i) for i in range(2))
        first, count = share(size, part, parts)
        totals = [k.registers(lanes) for _ in range(_STREAMS)]
        for total in totals:
            k.fill(total, 0, UOp.const(0.0, F32))
        with k.loop(count) as i:
            for s, total in enumerate(totals):
                at = ((start + first + i) * _STREAMS + s) * lanes
                k.store(total, 0, k.vector(total, 0) + k.vector(data, at))
        whole = functools.reduce(lambda a, b: a + b, [k.vector(total, 0) for total in totals])
        k.store(sums, part, k.across(whole, Ops.ADD))
        return k.finish("read")

    return kernel
