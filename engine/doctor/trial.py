"""`python -m engine.doctor.trial BACKEND`: a small computation on a backend, in half precision and as a captured graph,
and what came of it as a line of JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from engine.backends import install, prepare
from engine.doctor.trials import Trial
from engine.errors import OrinError
from engine.events import EngineOptions

_SIZE, _LAUNCHES, _ROUNDS = 256, 16, 20


def run(backend: str) -> Trial:
    """Raises whatever the backend does."""
    dev = prepare(EngineOptions(model_path="", backend=backend))
    install(dev)
    import numpy as np
    from tinygrad import Device, Tensor, TinyJit, dtypes

    from engine.devices.device_name import device_name
    from engine.measure.bandwidth import copy_gbps

    started = time.perf_counter()
    device = Device[Device.DEFAULT]
    arch = str(device.renderer.target.arch)
    numbers = np.arange(_SIZE * _SIZE, dtype=np.float32).reshape(_SIZE, _SIZE) % 13 - 6
    matrix, vector = Tensor(numbers), Tensor(numbers[:, 0].copy())
    if backend != "CPU":  # where half precision needs headers
        matrix, vector = matrix.half(), vector.half()
    got = matrix.matmul(vector, dtype=dtypes.float32).numpy()
    first_kernel_s = time.perf_counter() - started
    wrong = int((got != numbers @ numbers[:, 0]).sum())
    state = Tensor.zeros(_SIZE).contiguous().realize()

    def launches() -> None:
        for _ in range(_LAUNCHES):
            state.assign(state * 0.5 + 1).realize()

    step = TinyJit(launches)
    best_us = float("inf")
    for _ in range(_ROUNDS):
        device.synchronize()
        began = time.perf_counter()
        step()
        device.synchronize()
        best_us = min(best_us, (time.perf_counter() - began) * 1e6 / _LAUNCHES)
    wrong += int((np.abs(state.numpy() - 2) > 1e-5).sum())
    name = device_name(Device.DEFAULT)
    if wrong:
        text = f"{wrong} numbers came out wrong on {name}"
        return Trial(backend=backend, ok=False, text=text, advice="Do not use it; please send the report.")
    gbps = copy_gbps(Device.DEFAULT)
    text = (
        f"works on {name}{_chip(device)}: first kernel after {first_kernel_s:.1f} s, then one each "
        f"{best_us:.1f} µs in a graph, {'reads' if backend == 'CPU' else 'copies'} {gbps:.0f} GB/s"
    )
    return Trial(
        backend=backend,
        ok=True,
        text=text,
        device=name,
        arch=arch,
        first_kernel_s=first_kernel_s,
        launch_us=best_us,
        copy_gbps=gbps,
    )


def _chip(device: object) -> str:
    """What the driver of a Jetson says of its GPU, which depends on the power mode."""
    iface = getattr(device, "iface", None)
    if not hasattr(iface, "characteristics"):
        return ""
    assert iface is not None
    return f" ({iface.multiprocessors} multiprocessors)"


def main(backend: str, run: Callable[[str], Trial]) -> None:
    """Writes what comes of `run`, whatever that is."""
    try:
        trial = run(backend)
    except OrinError as error:
        trial = Trial(backend=backend, ok=False, text=error.message.rstrip("."), advice=error.hint)
    except Exception as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        text = " ".join("; ".join(f"{type(e).__name__}: {e}" for e in causes).split())[:300]
        advice = "Choose another backend that works; please send the report if you expected this one to."
        trial = Trial(backend=backend, ok=False, text=text, advice=advice)
    sys.stdout.write("\n" + msgspec.json.encode(trial).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], run)
