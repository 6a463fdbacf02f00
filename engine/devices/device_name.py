"""The name of the device that the engine computes on."""

from __future__ import annotations

import platform
from pathlib import Path

from engine.devices import cuda_driver


def device_name(backend: str) -> str:
    """The maker's name of the device that tinygrad calls `backend` ("CPU", "CUDA", "NV"), as "NVIDIA H200"."""
    names = cuda_driver.device_names() if backend.startswith(("CUDA", "NV")) else []
    return names[0] if names else _cpu_name()


def _cpu_name() -> str:
    """From Linux: the CPU's model name on x86, the board's name on Arm."""
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
