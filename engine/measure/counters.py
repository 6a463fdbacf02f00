"""The machine's counters for the dashboard: clocks, load, temperature, power and memory activity.

A counter that cannot be read appears too, with the reason; it is never 0 instead. The sources are: sysfs and debugfs on
a Jetson, NVML on other NVIDIA GPUs, and /proc and sysfs for the CPU. They read below `root`, so that tests can provide
the files of another machine. Reading all takes a few milliseconds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from engine.devices.nvidia import is_jetson
from engine.measure.cpu_counters import CpuCounters
from engine.measure.jetson_counters import JetsonCounters
from engine.measure.nvml_counters import NvmlCounters
from engine.protocol.events import Counter


class Source(Protocol):
    def read(self) -> Iterator[Counter]: ...


class NoCounters:
    """The counters of a machine whose GPU, if there is one, has none."""

    def read(self) -> Iterator[Counter]:
        return iter(())


def device_counters(root: Path = Path("/"), nvml_module: str = "pynvml") -> Source:
    """The counters of the GPU: clocks, power and what throttles it; on a Jetson those of the whole board."""
    if is_jetson(root):
        return JetsonCounters(root)
    return NvmlCounters(nvml_module) if (root / "dev/nvidiactl").exists() else NoCounters()


class Counters:
    """All counters of a machine. Not thread-safe, and meant to be read at most once a second."""

    def __init__(
        self, root: Path = Path("/"), *, process_id: int | None = None, nvml_module: str = "pynvml"
    ) -> None:
        """`process_id`: see `CpuCounters`. `nvml_module`: the Python module that wraps NVML."""
        self._sources = [device_counters(root, nvml_module), CpuCounters(root, process_id)]

    def read(self) -> tuple[Counter, ...]:
        return tuple(counter for source in self._sources for counter in source.read())
