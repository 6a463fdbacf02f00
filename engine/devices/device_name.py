"""The name of the device that the engine computes on."""

import functools
import platform
import re
from pathlib import Path

from engine.devices import cuda_driver
from engine.devices.system_files import read_text

_gpus: list[str] = []  # as the driver has named them, once it has: a start asks for each product


def device_name(backend: str) -> str:
    """The maker's name of the device that tinygrad calls `backend` ("CPU", "CUDA", "NV"), as "NVIDIA H200"."""
    if not backend.startswith(("CUDA", "NV")):
        return _processor()
    _gpus[:] = _gpus or cuda_driver.device_names()
    return _gpus[0] if _gpus else _processor()


@functools.cache
def _processor() -> str:
    """From Linux: the CPU's model name on x86, the board's name on Arm."""
    model = re.search(r"^model name\s*: *(.+)", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    board = read_text(Path("/proc/device-tree/model"))
    return (model[1].strip() if model else board) or platform.processor() or platform.machine()
