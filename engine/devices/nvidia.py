"""Which NVIDIA GPUs a machine has, and which of them tinygrad's backend NV is for."""

from __future__ import annotations

import re
from pathlib import Path

from engine.devices import cuda_driver
from engine.devices.system_files import read_text
from engine.tegra.abi import CTRL

_FOR_ITS_OWNER = re.compile(r"GeForce|\bRTX\b|TITAN|Quadro", re.IGNORECASE)
_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def gpus(root: Path = Path("/")) -> list[str]:
    """The names of the GPUs that the desktop driver (nvidia.ko) has, as it tells in /proc; where it does not, as in
    some containers, CUDA is asked. Empty where there are none, nobody tells, or it is a Jetson."""
    if (root / CTRL.lstrip("/")).exists():
        return []
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = [match[1] for file in files if (match := re.search(r"Model:\s*(.+)", read_text(file)))]
    return names or (cuda_driver.device_names() if root == Path("/") else [])


def why_not_nv(names: list[str]) -> str:
    """Why GPUs of these names are not to be driven by NV, in a few words; "" where they may be.

    NV talks to the kernel driver itself. It sets clocks when it starts, and a kernel that goes wrong leaves errors
    behind: nothing for a GPU in a data centre, which others use too. There, and on chips that tinygrad 0.14 does not
    know (ops_nv's list of compute classes), CUDA is the way.
    """
    for name in names:
        if _HOPPER.search(name):
            return f"tinygrad's NV does not know Hopper ({name})"
        if not _FOR_ITS_OWNER.search(name):
            return f"NV is for GeForce, RTX and Jetson, not for a GPU of data centres ({name})"
    return ""
