"""The bandwidth of a device's memory, as a copy shows it: what the speed of decoding is held against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes

DEVICE_BYTES = 256 << 20  # beyond the caches of the largest devices (50 MB of L2 on an H100)
HOST_BYTES = 128 << 20
COPIES = 8  # in one graph, so that the launch does not count
ROUNDS = 8


def copy_gbps(device: str) -> float:
    """10^9 bytes a second, read and written, by the best of some copies in the memory of `device` (tinygrad's
    name). On a CPU all cores copy with the C library's memcpy, since tinygrad's copies are slower than the
    memory; elsewhere it is a kernel.
    """
    if device.split(":")[0] == "CPU":
        return _host_copy_gbps()
    gbps = _kernel_copy_gbps(device)
    Device[device].allocator.free_cache()  # the memory may be the machine's own, as on Jetson
    return gbps


def _host_copy_gbps() -> float:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    source, target = np.ones(HOST_BYTES, np.uint8), np.empty(HOST_BYTES, np.uint8)
    slices = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
    with ThreadPoolExecutor(cores) as pool:
        return _best_gbps(HOST_BYTES, lambda: list(pool.map(lambda pair: np.copyto(*pair), slices)))


def _kernel_copy_gbps(device: str) -> float:
    source = Tensor.ones(DEVICE_BYTES // 4, dtype=dtypes.float32, device=device).contiguous().realize()
    target = Tensor.empty(DEVICE_BYTES // 4, dtype=dtypes.float32, device=device).realize()

    def copies() -> None:
        for _ in range(COPIES):
            target.assign(source + 1).realize()

    captured = TinyJit(copies)  # a launch by way of tinygrad's scheduler takes longer than the copy

    def copy() -> None:
        captured()
        Device[device].synchronize()

    return _best_gbps(COPIES * DEVICE_BYTES, copy)


def _best_gbps(n_bytes: int, copy: Callable[[], object]) -> float:
    """`copy` reads and writes `n_bytes`. The first rounds compile it and touch its memory."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * n_bytes / best_s / 1e9
