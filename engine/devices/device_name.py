"""What machine this is."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path


def device_name(backend: str) -> str:
    """The name its maker gave the device that tinygrad calls `backend`, as "NVIDIA H200"."""
    if backend.startswith(("CUDA", "NV")) and (name := _cuda_name()):
        return name
    return _cpu_name()


def _cuda_name() -> str:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    name = ctypes.create_string_buffer(128)
    failed = cuda.cuInit(0) or cuda.cuDeviceGetName(name, len(name), 0)
    return "" if failed else name.value.decode(errors="replace")


def _cpu_name() -> str:
    """As Linux tells it: x86 has a model name; ARM boards, the board's."""
    for path, key in ((Path("/proc/cpuinfo"), "model name"), (Path("/proc/device-tree/model"), "")):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if not key:
            return text.strip("\0\n ")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return platform.processor() or platform.machine()
