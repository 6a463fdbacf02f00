"""The CUDA driver library (libcuda), called directly: these questions are asked before tinygrad opens a device.

Names of functions and structures are those of cuda.h (CUDA driver API). Nothing here allocates memory on a GPU.
"""

import contextlib
import ctypes
import os
import threading
from pathlib import Path

from engine.devices.driver_watch import watched

LIBRARY = "libcuda.so.1"
TEGRA_FOLDERS = "usr/lib/aarch64-linux-gnu/nvidia", "usr/lib/aarch64-linux-gnu/tegra"
"""Where JetPack has the library. Its linker knows them, unless the image is a container or was changed."""
_NAME_BYTES = 256
NO_ANSWER = "the NVIDIA driver does not answer"
START_S = 30.0  # eight GPUs that nobody keeps awake take some twenty seconds
_HANGS = -1  # no CUresult
_is_hanging = False  # later questions do not wait for it again
_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def library() -> ctypes.CDLL | None:
    """The driver library; None on a machine without an NVIDIA driver."""
    for name in (LIBRARY, *(f"/{folder}/{LIBRARY}" for folder in TEGRA_FOLDERS)):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def search_path(root: Path = Path("/")) -> str:
    """LD_LIBRARY_PATH with JetPack's folders, in which tinygrad would not look for the library."""
    folders = [f"/{folder}" for folder in TEGRA_FOLDERS if (root / folder / LIBRARY).exists()]
    own = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(folder for folder in (*own, *folders) if folder))


def _initialized(cuda: ctypes.CDLL) -> int:
    """What cuInit returns; _HANGS if it has not returned within START_S. Its thread is left behind then."""
    global _is_hanging
    if not _is_hanging:
        errors: list[int] = []
        thread = threading.Thread(target=lambda: errors.append(cuda.cuInit(0)), name="cuInit", daemon=True)
        thread.start()
        thread.join(START_S)
        if errors:
            return errors[0]
        _is_hanging = True
    return _HANGS


def unusable_because() -> str:
    """Why CUDA cannot be used on this machine, in a few words; "" if it can."""
    if (cuda := library()) is None:
        return f"there is no NVIDIA driver ({LIBRARY})"
    count = ctypes.c_int()
    if error := _initialized(cuda) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return NO_ANSWER if error == _HANGS else f"the NVIDIA driver reports error {error}"
    return "" if count.value else "the NVIDIA driver shows no GPU"


def device_names() -> list[str]:
    """The names of all GPUs in CUDA's order, as "NVIDIA H200"; empty if the driver reports none."""
    cuda, count, name = library(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    if cuda is None or _initialized(cuda) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [
        name.value.decode(errors="replace")
        for i in range(count.value)
        if not cuda.cuDeviceGetName(name, len(name), i)
    ]


def _first_device() -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """The library and the first GPU in CUDA's order; None if there is none."""
    cuda, device = library(), ctypes.c_int()
    if cuda is None or _initialized(cuda) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    return cuda, device


def pci_bus_id() -> str:
    """Where the first GPU in CUDA's order is plugged in, as "0000:1B:00.0"; "" if there is none. By that NVML knows it,
    which has an order of its own, and heeds no CUDA_VISIBLE_DEVICES."""
    if (first := _first_device()) is None:
        return ""
    (cuda, device), name = first, ctypes.create_string_buffer(_NAME_BYTES)
    return "" if cuda.cuDeviceGetPCIBusId(name, len(name), device) else name.value.decode()


def memory_bytes() -> int:
    """All memory of the first GPU; 0 if there is none."""
    if (first := _first_device()) is None:
        return 0
    (cuda, device), total = first, ctypes.c_size_t()
    return 0 if cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) else total.value


def compute_capability() -> tuple[int, int]:
    """The compute capability of the first GPU, as (8, 7); (0, 0) if there is no GPU."""
    if (first := _first_device()) is None:
        return 0, 0
    (cuda, device), part = first, ctypes.c_int()
    parts = [
        0 if cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device) else part.value
        for attribute in _CAPABILITY
    ]
    return parts[0], parts[1]


def free_bytes() -> int:
    """Free memory of the GPU whose context is current in this thread; 0 if there is none."""
    cuda, free, total = library(), ctypes.c_size_t(), ctypes.c_size_t()
    if cuda is None or watched(cuda.cuMemGetInfo_v2)(ctypes.byref(free), ctypes.byref(total)):
        return 0
    return free.value


def version() -> str:
    """The newest CUDA release that the driver supports, as "12060" for 12.6; "" without a driver."""
    cuda, number = library(), ctypes.c_int()
    return "" if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(number)) else str(number.value)
