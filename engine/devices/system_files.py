"""The files in which Linux describes a machine: below /proc, /sys and /etc."""

import re
from pathlib import Path


def read_text(path: Path) -> str:
    """The text without space at its ends, and without the zero byte that ends device tree files. "" if it cannot be
    read."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """/proc/meminfo (proc_meminfo(5)) in bytes, by field: "MemTotal", "MemAvailable", … Empty if it cannot be read."""
    fields = re.findall(r"^(\w+):\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in fields}
