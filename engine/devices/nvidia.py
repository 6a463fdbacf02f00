"""The NVIDIA GPUs of a machine, and which of them tinygrad's NV backend may drive."""

import re
from pathlib import Path

from engine.devices import cuda_driver
from engine.devices.system_files import read_text
from engine.tegra.abi import CTRL

_DESKTOP_GPU = re.compile(r"GeForce|\bRTX\b|TITAN|Quadro", re.IGNORECASE)
_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def gpus(root: Path = Path("/")) -> list[str]:
    """The names of the GPUs of the desktop driver (nvidia.ko), from /proc, or from CUDA if /proc does not list them, as
    in some containers. Empty on a Jetson, and if neither lists any."""
    if (root / CTRL.lstrip("/")).exists():
        return []
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = [match[1] for file in files if (match := re.search(r"Model:\s*(.+)", read_text(file)))]
    return names or (cuda_driver.device_names() if root == Path("/") else [])


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether the system is NVIDIA's Linux for Tegra."""
    return (root / "etc/nv_tegra_release").exists()


def why_not_nv(names: list[str]) -> str:
    """Why NV must not drive GPUs with these names, in a few words; "" if it may.

    NV calls the kernel driver directly. It changes clocks when it starts, and a faulting kernel leaves the GPU in an
    error state, so it is not for a data centre GPU that others use too. It also does not support chips that are missing
    in tinygrad 0.14's list of compute classes (ops_nv). CUDA works on all of these.
    """
    for name in names:
        if _HOPPER.search(name):
            return f"tinygrad's NV does not know Hopper ({name})"
        if not _DESKTOP_GPU.search(name):
            return f"NV is for GeForce, RTX and Jetson, not for a GPU of data centres ({name})"
    return ""
