"""The bandwidth of a device's memory: what the speed of decoding is held against. A GPU's is what a copy reaches, read
and written. A CPU's is what reading alone reaches, as decoding does little else: writing takes more of the
memory than it moves, so that copies fall short of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from tinygrad import Device, Tensor, dtypes

from engine.kernels.gpu.copy_kernel import BLOCK_FLOATS, copy_kernel
from engine.kernels.gpu.kernel_sequence import KernelSequence

DEVICE_BYTES = 256 << 20  # beyond the caches of the largest devices (50 MB of L2 on an H100)
HOST_BYTES = 128 << 20
COPIES = 16  # in one graph, so that the launch does not count
ROUNDS, HOST_ROUNDS = 8, 24


def copy_gbps(device: str) -> float:
    """10^9 bytes a second, by the best of some rounds, in the memory of `device` (tinygrad's name): of copies, read
    and written; on a CPU, where all cores take part, of reading."""
    if device.split(":")[0] == "CPU":
        from engine.kernels.cpu.read_bandwidth import read_gbps

        return read_gbps(HOST_BYTES, HOST_ROUNDS)
    gbps = _kernel_copy_gbps(device)
    Device[device].allocator.free_cache()  # the memory may be the machine's own, as on Jetson
    return gbps


def _kernel_copy_gbps(device: str) -> float:
    """tinygrad's own cut of a copy, in blocks of 32 threads, reaches 40 % of what the memory of an H200 gives."""
    size = DEVICE_BYTES // 4 // BLOCK_FLOATS * BLOCK_FLOATS
    source = Tensor.ones(size, dtype=dtypes.float32, device=device).contiguous().realize()
    target = Tensor.empty(size, dtype=dtypes.float32, device=device).contiguous().realize()
    sequence = KernelSequence()
    for _ in range(COPIES):
        sequence.add(copy_kernel(size), target, source)
    copies = sequence.capture()

    def copy() -> None:
        copies()
        Device[device].synchronize()

    return _best_gbps(COPIES * size * 4, copy)


def _best_gbps(n_bytes: int, copy: Callable[[], object]) -> float:
    """`copy` reads and writes `n_bytes`. The first rounds touch its memory."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * n_bytes / best_s / 1e9
