"""How much memory a process and the GPUs use, seen from outside, so that all engines are measured alike."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """Bytes of a process in the machine's memory: now, and at most so far. The pages of a file that it maps
    count while they are in memory."""

    now: int
    peak: int


def resident(pid: int | None) -> Resident | None:
    """None where the system does not tell (it is not Linux, or the process is gone)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in fields or "VmHWM" not in fields:  # a zombie has neither
        return None
    return Resident(*(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")))  # in "kB"


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t of nvml.h."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def gpu_used_bytes() -> int | None:
    """Bytes in use on all NVIDIA GPUs together, by whomever; None without any (Jetson has no NVML for it).

    The difference between before and after an engine is started is what it took.
    """
    nvml = _nvml()
    count = ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
        return None
    used = 0
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _NvmlMemory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return None
        used += memory.used
    return used
