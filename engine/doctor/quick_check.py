"""`python -m engine.doctor.quick_check BACKEND`: computes a little on a backend, in half precision and as a captured
graph, compares the numbers, and writes the result as a line of JSON."""

from __future__ import annotations

import sys
import time

from engine.backends import install, prepare
from engine.doctor.check_result import CheckResult, write_result, wrong_results
from engine.events import EngineOptions

_SIZE, _LAUNCHES, _ROUNDS = 256, 16, 20  # rows of the matrix, kernels in the graph, replays of it


def run(backend: str) -> CheckResult:
    """Raises whatever the backend raises."""
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
        return wrong_results(backend, f"{wrong} numbers are wrong on {name}")
    gbps = copy_gbps(Device.DEFAULT)
    text = (
        f"works on {name}{_multiprocessors(device)}: first kernel after {first_kernel_s:.1f} s, then "
        f"{launch_us:.1f} µs for each in a graph, {'reads' if backend == 'CPU' else 'copies'} {gbps:.0f} GB/s"
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


def _multiprocessors(device: object) -> str:
    """On a Jetson, how many multiprocessors its power mode leaves on; "" on other devices."""
    count = getattr(getattr(device, "iface", None), "multiprocessors", None)
    return f" ({count} multiprocessors)" if count else ""


if __name__ == "__main__":
    write_result(sys.argv[1], run)
