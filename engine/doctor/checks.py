"""`python -m engine.doctor.checks CHECK BACKEND`: a check, in a process of its own. Its result is a line of JSON.

quick: computes a little on a backend, in half precision and as a captured graph, and compares the numbers.

stress: faults that show only on a real GPU under load. 10,000 kernels run in captured graphs. Each depends on the one
before, so that a lost one shows in the sum. Then buffers of 512 MiB, 9 GiB together, get numbers of their own, which
must still be in them when the last is filled: on a Jetson, a buffer in one of the GPU's memory windows would stop the
GPU (see `engine.tegra.memory`). endless: launches such kernels until it is killed.

driver: asks a Jetson's drivers about its GPU, through the interface for which the NV backend was written. It opens
neither an address space nor a channel.
"""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import msgspec

from engine.backends import install, prepare
from engine.devices.system_files import meminfo
from engine.errors import OrinError, one_line
from engine.protocol.events import EngineOptions

# Of the quick check: rows of the matrix, kernels in the graph, replays of it.
_SIZE, _LAUNCHES, _ROUNDS = 256, 16, 20
_KERNELS, _IN_GRAPH = 10_000, 100
_BUFFER_BYTES, _GPU_BYTES, _CPU_BYTES = 512 << 20, 9 << 30, 1 << 30


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """If it is not `ok`, `text` says why and `advice` what to do. `arch` is as "sm_87"; the other figures are those
    of the quick check."""

    backend: str
    ok: bool
    text: str
    advice: str = ""
    device: str = ""
    arch: str = ""
    first_kernel_s: float | None = None
    launch_us: float | None = None
    copy_gbps: float | None = None


def end_with_parent() -> None:
    """Has a thread end this process and what it started when nobody holds the other end of its standard input any more,
    if that is a pipe (`backend_checks`)."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing is written there
        os.killpg(0, signal.SIGKILL)

    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        threading.Thread(target=wait, daemon=True).start()


def write_result(backend: str, check: Callable[[str], CheckResult]) -> None:
    """Runs `check` and writes its result to standard output, also if the check raises."""
    try:
        result = check(backend)
    except OrinError as error:
        result = CheckResult(backend=backend, ok=False, text=error.message.rstrip("."), advice=error.hint)
    except Exception as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        text = one_line("; ".join(f"{type(e).__name__}: {e}" for e in causes), 300)
        advice = "Choose another backend that works; please send the report if you expected this one to."
        result = CheckResult(backend=backend, ok=False, text=text, advice=advice)
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()


def _wrong_results(backend: str, text: str) -> CheckResult:
    """For a backend that computes something else than it should."""
    return CheckResult(backend=backend, ok=False, text=text, advice="Do not use it; please send the report.")


# --- the checks: they raise whatever the backend raises ---------------------------------------------------


def quick(backend: str) -> CheckResult:
    install(prepare(EngineOptions(model_path="", backend=backend)))
    import numpy as np
    from tinygrad import Device, Tensor, TinyJit, dtypes

    from engine.devices.device_name import device_name
    from engine.measure.bandwidth import copy_gbps

    opening = time.perf_counter()
    device = Device[Device.DEFAULT]
    numbers = np.arange(_SIZE * _SIZE, dtype=np.float32).reshape(_SIZE, _SIZE) % 13 - 6
    matrix, vector = Tensor(numbers), Tensor(numbers[:, 0].copy())
    if backend != "CPU":  # half precision on a GPU needs CUDA's headers
        matrix, vector = matrix.half(), vector.half()
    product = matrix.matmul(vector, dtype=dtypes.float32).numpy()
    first_kernel_s = time.perf_counter() - opening
    wrong = int((product != numbers @ numbers[:, 0]).sum())
    state = Tensor.zeros(_SIZE).contiguous().realize()

    def launches() -> None:
        for _ in range(_LAUNCHES):
            state.assign(state * 0.5 + 1).realize()  # converges to 2

    step = TinyJit(launches)
    launch_us = float("inf")
    for _ in range(_ROUNDS):
        device.synchronize()
        started = time.perf_counter()
        step()
        device.synchronize()
        launch_us = min(launch_us, (time.perf_counter() - started) * 1e6 / _LAUNCHES)
    wrong += int((np.abs(state.numpy() - 2) > 1e-5).sum())
    name = device_name(Device.DEFAULT)
    if wrong:
        return _wrong_results(backend, f"{wrong} numbers are wrong on {name}")
    gbps = copy_gbps(Device.DEFAULT)
    # On a Jetson, how many multiprocessors its power mode leaves on.
    multiprocessors = getattr(getattr(device, "iface", None), "multiprocessors", None)
    text = (
        f"works on {name}{f' ({multiprocessors} multiprocessors)' if multiprocessors else ''}: first kernel after "
        f"{first_kernel_s:.1f} s, then {launch_us:.1f} µs for each in a graph, "
        f"{'reads' if backend == 'CPU' else 'copies'} {gbps:.0f} GB/s"
    )
    return CheckResult(
        backend=backend,
        ok=True,
        text=text,
        device=name,
        arch=str(device.renderer.target.arch),
        first_kernel_s=first_kernel_s,
        launch_us=launch_us,
        copy_gbps=gbps,
    )


def stress(backend: str) -> CheckResult:
    install(prepare(EngineOptions(model_path="", backend=backend)))
    if lost := lost_kernels(_KERNELS):
        return _wrong_results(backend, f"{lost} of {_KERNELS:,} dependent kernels did not count")
    # A Jetson's GPU shares the machine's memory.
    available = meminfo().get("MemAvailable", 2 * _BUFFER_BYTES)
    limit = _CPU_BYTES if backend == "CPU" else _GPU_BYTES
    held, damaged = hold_buffers(min(limit, available // 2), _BUFFER_BYTES)
    gib = held / 2**30
    if damaged:
        return _wrong_results(backend, f"{damaged} buffers of {gib:.1f} GiB lost what was written to them")
    text = (
        f"{_KERNELS:,} dependent kernels, none lost; {gib:.1f} GiB in buffers of 512 MiB kept their contents"
    )
    return CheckResult(backend=backend, ok=True, text=text)


def endless(backend: str) -> CheckResult:
    install(prepare(EngineOptions(model_path="", backend=backend)))
    while True:
        lost_kernels(_KERNELS)


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


def driver(name: str) -> CheckResult:
    """Raises DriverError if the drivers have another interface."""
    from engine.tegra.abi import L4T
    from engine.tegra.driver import Control, Nvmap

    with closing(Nvmap()), closing(Control()) as control:
        gpu, multiprocessors = control.characteristics(), control.multiprocessors()
        free = control.free_bytes()
    chip = bytes(gpu.chipname).decode(errors="replace")
    arch = f"sm_{gpu.sm_version >> 8}{gpu.sm_version & 0xFF}"
    text = (
        f"has the interface of {L4T}: {chip}, {arch}, {multiprocessors} multiprocessors, "
        f"at most {gpu.max_freq / 1e6:.0f} MHz, {gpu.l2_cache_size >> 20} MiB L2 cache, {free / 1e9:.1f} GB free"
    )
    return CheckResult(backend=name, ok=True, text=text, arch=arch)


if __name__ == "__main__":
    end_with_parent()
    _check, _backend = sys.argv[1:]
    write_result(_backend, {"quick": quick, "stress": stress, "endless": endless, "driver": driver}[_check])
