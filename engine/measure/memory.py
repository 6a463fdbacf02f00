"""The memory that a process and the GPUs use, read from outside the process, so that all engines are measured alike."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.devices import cuda_driver
from engine.devices.system_files import read_text
from engine.measure.patience import Patient


@dataclass(frozen=True)
class ResidentMemory:
    """A process's resident memory, now and at its peak. It includes the pages of mapped files that are in memory."""

    now_bytes: int
    peak_bytes: int


def resident_memory(pid: int | None) -> ResidentMemory | None:
    """The resident memory of a process (proc_pid_status(5): VmRSS, VmHWM). None if the process has ended, or the system
    is not Linux."""
    status = read_text(Path(f"/proc/{pid}/status"))
    kib = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
    if len(kib) < 2:  # a zombie has neither
        return None
    return ResidentMemory(int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024)


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t of nvml.h."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@cache
def _nvml() -> ctypes.CDLL | None:
    """NVML without its Python module, which is optional."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def _read_gpus() -> list[_NvmlMemory] | None:
    """The memory of each NVIDIA GPU. None on a Jetson, whose NVML has no such figure."""
    nvml, count = _nvml(), ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    found = [_memory(nvml.nvmlDeviceGetHandleByIndex_v2, index) for index in range(count.value)]
    return None if None in found else [memory for memory in found if memory]


def _read_first() -> _NvmlMemory | None:
    """The memory of the first GPU in CUDA's order."""
    nvml, place = _nvml(), cuda_driver.pci_bus_id()
    if nvml is None:
        return None
    by_place, by_index = nvml.nvmlDeviceGetHandleByPciBusId_v2, nvml.nvmlDeviceGetHandleByIndex_v2
    return _memory(by_place, place.encode()) if place else _memory(by_index, 0)


def _memory(handle_by: Callable[..., int], name: int | bytes) -> _NvmlMemory | None:
    """The memory of a GPU, which NVML's function `handle_by` finds by its number or its place."""
    nvml, device, memory = _nvml(), ctypes.c_void_p(), _NvmlMemory()
    if nvml is None or handle_by(name, ctypes.byref(device)):
        return None
    return None if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else memory


_gpus, _first = Patient(_read_gpus), Patient(_read_first)


def gpu_used_bytes() -> int | None:
    """Bytes in use by all processes on all NVIDIA GPUs. None without a GPU, on a Jetson, whose NVML has no such figure,
    and if the driver does not answer.

    What an engine took is the difference before and after its start.
    """
    gpus = _gpus()
    return sum(int(gpu.used) for gpu in gpus) if gpus else None


def gpu_free_bytes() -> int | None:
    """Free bytes of the first NVIDIA GPU in CUDA's order; None as for `gpu_used_bytes`."""
    first = _first()
    return int(first.free) if first else None
