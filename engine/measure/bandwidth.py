"""The bandwidth of a device's memory, the limit to which the speed of decode is compared.

On a GPU it is that of a copy: bytes read plus bytes written. On a CPU it is that of reading, since decode does little
else; a CPU's copies are slower, because the cache also reads the lines that it writes.
"""

import time
from collections.abc import Callable

from tinygrad import Device, Tensor, dtypes

from engine.targets.nvidia.kernels.copy_kernel import BLOCK_FLOATS, copy_kernel
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence

DEVICE_BYTES = 256 << 20  # beyond the caches of the largest devices (50 MB of L2 on an H100)
HOST_BYTES = 128 << 20
COPIES = 16  # in one graph, to hide the time of the launch
ROUNDS, HOST_ROUNDS = 8, 24


def copy_gbps(device: str) -> float:
    """The bandwidth of the memory of `device` (tinygrad's name), in 10^9 bytes a second: the best of several rounds."""
    if device.split(":")[0] == "CPU":
        from engine.targets.cpu.kernels.read_bandwidth import read_gbps

        return read_gbps(HOST_BYTES, HOST_ROUNDS)
    gbps = _kernel_copy_gbps(device)
    Device[device].allocator.free_cache()  # a Jetson's GPU uses the machine's memory
    return gbps


def _kernel_copy_gbps(device: str) -> float:
    """Measured with a kernel of our own: tinygrad's copy, in blocks of 32 threads, reaches 40 % of an H200's
    bandwidth."""
    size = DEVICE_BYTES // 4 // BLOCK_FLOATS * BLOCK_FLOATS
    source = Tensor.ones(size, dtype=dtypes.float32, device=device).contiguous().realize()
    target = Tensor.empty(size, dtype=dtypes.float32, device=device).contiguous().realize()
    sequence = KernelSequence()
    for _ in range(COPIES):
        sequence.add(copy_kernel(size), target=target, source=source)
    copies = sequence.capture()

    def copy() -> None:
        copies()
        Device[device].synchronize()

    return _best_gbps(COPIES * size * 4, copy)


def _best_gbps(n_bytes: int, copy: Callable[[], object]) -> float:
    """The bandwidth of `copy`, which reads `n_bytes` and writes as many."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * n_bytes / best_s / 1e9
