"""`python -m engine.doctor.stress_check BACKEND`: faults that show only on a real GPU under load.

10,000 kernels run in captured graphs. Each depends on the one before, so that a lost one shows in the sum. Then
buffers of 512 MiB, 9 GiB together, get numbers of their own, which must still be in them when the last is filled: on a
Jetson, a buffer in one of the GPU's memory windows would stop the GPU (see `engine.tegra.memory`).

With "endless" as second argument it launches kernels until it is killed.
"""

from __future__ import annotations

import sys

from engine.backends import install, prepare
from engine.devices.system_files import meminfo
from engine.doctor.check_result import CheckResult, write_result, wrong_results
from engine.events import EngineOptions

_KERNELS, _IN_GRAPH = 10_000, 100
_BUFFER_BYTES, _GPU_BYTES, _CPU_BYTES = 512 << 20, 9 << 30, 1 << 30


def run(backend: str) -> CheckResult:
    """Raises whatever the backend raises."""
    install(prepare(EngineOptions(model_path="", backend=backend)))
    if lost := lost_kernels(_KERNELS):
        return wrong_results(backend, f"{lost} of {_KERNELS:,} dependent kernels did not count")
    # A Jetson's GPU shares the machine's memory.
    available = meminfo().get("MemAvailable", 2 * _BUFFER_BYTES)
    limit = _CPU_BYTES if backend == "CPU" else _GPU_BYTES
    held, damaged = hold_buffers(min(limit, available // 2), _BUFFER_BYTES)
    gib = held / 2**30
    if damaged:
        return wrong_results(backend, f"{damaged} buffers of {gib:.1f} GiB lost what was written to them")
    text = (
        f"{_KERNELS:,} dependent kernels, none lost; {gib:.1f} GiB in buffers of 512 MiB kept their contents"
    )
    return CheckResult(backend=backend, ok=True, text=text)


def lost_kernels(n: int) -> int:
    """Runs `n` kernels that each add one, and returns how many of them did not."""
    from tinygrad import Tensor, TinyJit, dtypes

    counts = Tensor.zeros(4096, dtype=dtypes.int32).contiguous().realize()

    def launches() -> None:
        for _ in range(_IN_GRAPH):
            counts.assign(counts + 1).realize()

    step = TinyJit(launches)
    for _ in range(3):  # TinyJit runs the first call as it is, captures the second, replays from the third
        step()
    before = counts.tolist()[0]
    for _ in range(n // _IN_GRAPH):
        step()
    return int(max(abs(count - before - n) for count in counts.tolist()))


def hold_buffers(n_bytes: int, buffer_bytes: int) -> tuple[int, int]:
    """Fills buffers until they are `n_bytes` together or memory is full. Returns the bytes of all buffers, and how many
    buffers hold wrong numbers at the end."""
    from tinygrad import Tensor, dtypes

    buffers: list[Tensor] = []
    for i in range(max(1, n_bytes // buffer_bytes)):
        try:
            buffers.append(
                Tensor.full((buffer_bytes // 4,), i + 1, dtype=dtypes.int32).contiguous().realize()
            )
        except (MemoryError, RuntimeError):
            break
    damaged = sum(
        not (int(buffer.min().item()) == int(buffer.max().item()) == i + 1)
        for i, buffer in enumerate(buffers)
    )
    return len(buffers) * buffer_bytes, damaged


def run_endlessly(backend: str) -> CheckResult:
    install(prepare(EngineOptions(model_path="", backend=backend)))
    while True:
        lost_kernels(_KERNELS)


if __name__ == "__main__":
    write_result(sys.argv[1], run_endlessly if sys.argv[2:] == ["endless"] else run)
