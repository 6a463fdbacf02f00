"""The memory that is free for a model, on a machine and on its GPU."""

import re
from pathlib import Path, PurePosixPath

from engine.devices import cuda_driver
from engine.devices.nvidia import is_jetson
from engine.devices.system_files import meminfo, read_text
from engine.measure import memory

# The files of a control group's limit, its use, and the caches of files that its use counts: of both versions of the
# interface (admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst of Linux's documentation).
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", r"^(?:in)?active_file (\d+)"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        r"^total_(?:in)?active_file (\d+)",
    ),
)


def uses_host_memory(device: str) -> bool:
    """Whether tinygrad's device computes in the machine's memory: the CPU, and the GPU of a Jetson."""
    return device.split(":")[0] not in ("CUDA", "NV") or is_jetson()


def free_bytes(device: str) -> int | None:
    """Memory that is free for a model on tinygrad's device, which is open in this process. None if it is not known."""
    if uses_host_memory(device):
        return host_free_bytes()
    if device.startswith("CUDA"):
        return cuda_driver.free_bytes() or memory.gpu_free_bytes()
    return memory.gpu_free_bytes()


def host_free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can take without swapping: what the machine has available, within the limits of its
    control groups. Cached files count as free. None if the system does not say."""
    figures = [*_free_in_groups(root)]
    if (available := meminfo(root).get("MemAvailable")) is not None:
        figures.append(available)
    return max(0, min(figures)) if figures else None


def _free_in_groups(root: Path) -> list[int]:
    """What each control group of this process that has a limit leaves it."""
    free = []
    for line in read_text(root / "proc/self/cgroup").splitlines():  # cgroups(7)
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_file, use_file, cached = _GROUPS[bool(controllers)]
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            folder = root / mount / group
            limit, use = read_text(folder / limit_file), read_text(folder / use_file)
            if limit.isdigit() and use.isdigit():
                files = re.findall(cached, read_text(folder / "memory.stat"), re.MULTILINE)
                free.append(int(limit) - int(use) + sum(map(int, files)))
    return free
