"""The memory that a process and the GPUs use, read from outside the process, so that all engines are measured alike."""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
    nvml = _nvml()
    count = ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    gpus = []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _NvmlMemory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return None
        gpus.append(memory)
    return gpus


_gpus = Patient(_read_gpus)


def gpu_used_bytes() -> int | None:
    """Bytes in use by all processes on all NVIDIA GPUs. None without a GPU, on a Jetson, whose NVML has no such figure,
    and if the driver does not answer.

    What an engine took is the difference before and after its start.
    """
    gpus = _gpus()
    return sum(int(gpu.used) for gpu in gpus) if gpus else None


def gpu_free_bytes() -> int | None:
    """Free bytes of the first NVIDIA GPU; None as for `gpu_used_bytes`."""
    gpus = _gpus()
    return int(gpus[0].free) if gpus else None
