"""Counters of the first NVIDIA GPU in CUDA's order, which the engine takes, from NVML by its Python module (the package
nvidia-ml-py)."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.devices import cuda_driver
from engine.devices.system_files import read_text
from engine.measure.patience import Patient
from engine.protocol.events import Counter

# The reasons in nvmlClocksEventReasons (nvml.h) that slow a GPU down, without idleness and the user's own limits.
_THROTTLE_REASONS = {
    0x04: "power limit", 0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)",
    0x80: "power brake",
}  # fmt: skip


class NvmlCounters:
    """Load, memory activity, clocks, temperature, power, memory in use, and why the clocks are throttled. A driver that
    does not answer holds nobody."""

    def __init__(self, module: str) -> None:
        self._nvml: _Nvml | None = None
        self._read = Patient(lambda: self._of(module))

    def read(self) -> Iterator[Counter]:
        counters = self._read()
        yield from counters or [Counter(name="GPU", absent="NVML does not answer: the driver may hang")]

    def _of(self, module: str) -> tuple[Counter, ...]:
        self._nvml = self._nvml or _Nvml(module)
        return tuple(self._nvml.read())


class _Nvml:
    """NVML itself, in whose calls a thread may stay."""

    def __init__(self, module: str) -> None:
        self._absent = ""
        try:
            self._nvml: Any = importlib.import_module(module)
            self._nvml.nvmlInit()
            n, place = self._nvml, cuda_driver.pci_bus_id()
            self._gpu = n.nvmlDeviceGetHandleByPciBusId(place) if place else n.nvmlDeviceGetHandleByIndex(0)
        except ImportError:
            self._absent = "the package nvidia-ml-py is not installed"
        except Exception as error:  # NVMLError, whose class is in the module
            self._absent = f"NVML: {error}"

    def read(self) -> Iterator[Counter]:
        if self._absent:
            yield Counter(name="GPU", absent=self._absent)
            return
        n, gpu = self._nvml, self._gpu
        utilization, memory = (
            partial(f, gpu) for f in (n.nvmlDeviceGetUtilizationRates, n.nvmlDeviceGetMemoryInfo)
        )
        yield _counter("GPU load", "%", lambda: utilization().gpu, lambda: 100)
        yield _counter("memory activity", "%", lambda: utilization().memory, lambda: 100)
        for name, clock in (("GPU clock", n.NVML_CLOCK_SM), ("memory clock", n.NVML_CLOCK_MEM)):
            current, maximum = (
                partial(f, gpu, clock) for f in (n.nvmlDeviceGetClockInfo, n.nvmlDeviceGetMaxClockInfo)
            )
            yield _counter(name, "MHz", current, maximum)
        yield _counter("temperature", "°C", lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU))
        yield _counter(
            "power",
            "W",
            lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            lambda: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
        )
        used = _counter("GPU memory", "GB", lambda: memory().used / 1e9, lambda: memory().total / 1e9)
        yield replace(used, parts=self._programs())
        yield self._throttling()

    def _programs(self) -> tuple[str, ...]:
        """The programs that hold the GPU's memory, those with most first, as far as the driver tells."""
        with contextlib.suppress(Exception):
            held = [
                (p.usedGpuMemory or 0, p.pid)
                for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)
            ]
            return tuple(
                f"{_program(pid)} {used / 1e9:.1f} GB" for used, pid in sorted(held, reverse=True)[:4]
            )
        return ()

    def _throttling(self) -> Counter:
        try:
            bits = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu))
        except Exception as error:
            return Counter(name="throttled", absent=f"NVML: {error}")
        reasons = tuple(dict.fromkeys(text for bit, text in _THROTTLE_REASONS.items() if bits & bit))
        return Counter(name="throttled", text=", ".join(reasons) or "no", parts=reasons)


def _counter(
    name: str, unit: str, value: Callable[[], float], maximum: Callable[[], float] = lambda: 0
) -> Counter:
    """A counter from two calls of NVML, which may raise."""
    try:
        current = float(value())
    except Exception as error:
        return Counter(name=name, absent=f"NVML: {error}")
    limit = 0.0
    with contextlib.suppress(Exception):
        limit = float(maximum())
    return Counter(name=name, value=current, unit=unit, maximum=limit or None)


def _program(pid: int) -> str:
    return read_text(Path(f"/proc/{pid}/comm")).strip() or f"process {pid}"
