"""What every machine has: an operating system, Python, memory, a compiler."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.backends import flaw
from engine.devices.device_name import device_name
from engine.doctor import Finding, bad, fair, good, note
from engine.errors import BackendError
from engine.events import Counter
from engine.fixes import TINYGRAD

_GPU_DRIVERS = re.compile(r"nvgpu|nvmap|NVRM|ga10b|Xid|host1x|arm-smmu")
LEAST_FREE_BYTES = 2e9  # a small model and its context


def examine(root: Path = Path("/")) -> list[Finding]:
    return [
        note("system", _system(root)),
        note("processor", f"{device_name('CPU')}, {_cores(root)} cores"),
        _memory(root),
        _tinygrad(),
        *_compiler(),
    ]


def _system(root: Path) -> str:
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', read(root / "etc/os-release"), re.MULTILINE)
    kernel = read(root / "proc/sys/kernel/osrelease").strip() or platform.release()
    name = release[1] if release else platform.system()
    return f"{name}, kernel {kernel}, {platform.machine()}, Python {platform.python_version()}"


def _cores(root: Path) -> int:
    return len(re.findall(r"^cpu\d+ ", read(root / "proc/stat"), re.MULTILINE))


def _memory(root: Path) -> Finding:
    found = dict(
        re.findall(r"^(MemTotal|MemAvailable|SwapTotal):\s+(\d+) kB", read(root / "proc/meminfo"), re.M)
    )
    if "MemAvailable" not in found:
        return note("memory", "this machine does not tell")
    total, free, swap = (
        int(found.get(f"{name}", 0)) * 1024 for name in ("MemTotal", "MemAvailable", "SwapTotal")
    )
    text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free, {swap / 1e9:.1f} GB swap"
    if free < LEAST_FREE_BYTES:
        return fair(
            "memory", text, "Close other programs, or take a small model: orin-chat --model qwen3:0.6b"
        )
    return good("memory", text)


def _tinygrad() -> Finding:
    try:
        found = version("tinygrad")
    except PackageNotFoundError:
        found = "none"
    if found == TINYGRAD:
        return good("tinygrad", found)
    advice = f"Install the one this program is made for: pip install tinygrad=={TINYGRAD}"
    return bad("tinygrad", f"{found} is installed, {TINYGRAD} is needed", advice)


def _compiler() -> Iterator[Finding]:
    try:
        problem = flaw("CPU")
    except BackendError as error:
        yield bad("clang", error.message.rstrip("."), error.hint)
        return
    if problem:
        yield bad("clang", problem, "Install clang from your system's packages, or run: pip install ziglang")
    else:
        yield good("clang", "there is one")


def kernel_log(lines: int = 40) -> list[str]:
    """The last lines of the kernel's log that are a GPU driver's; none where this user may not read it."""
    try:
        run = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in run.stdout.splitlines() if _GPU_DRIVERS.search(line)][-lines:]


def read(path: Path) -> str:
    """The text of a file, without what device trees end theirs with; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").replace("\0", "")
    except OSError:
        return ""


def as_text(counter: Counter) -> str:
    """A figure of the machine's own, or why there is none."""
    if counter.absent:
        return counter.absent
    if counter.text:
        return counter.text
    most = f" of {counter.most:.0f}" if counter.most else ""
    return f"{counter.value:.0f}{most} {counter.unit}" if counter.value is not None else "not known"
