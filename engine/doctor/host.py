"""What every machine has: an operating system, Python, memory, a compiler."""

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.backends import unusable_because
from engine.devices.device_name import device_name
from engine.devices.system_files import meminfo, read_text
from engine.doctor import Finding, bad, fair, good, note
from engine.errors import BackendError
from engine.fixes import TINYGRAD
from engine.protocol.events import Counter
from engine.system.invocation import call, pip_install

_GPU_DRIVERS = re.compile(r"nvgpu|nvmap|NVRM|ga10b|Xid|host1x|arm-smmu")
SMALL_MODEL_BYTES = 2e9  # what a small model and its context need


def examine(root: Path = Path("/")) -> list[Finding]:
    cores = re.findall(r"^cpu\d+ ", read_text(root / "proc/stat"), re.MULTILINE)
    return [
        note("system", _system(root)),
        note("processor", f"{device_name('CPU')}, {len(cores)} cores"),
        _memory(root),
        _tinygrad(),
        _compiler(),
    ]


def _system(root: Path) -> str:
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', read_text(root / "etc/os-release"), re.MULTILINE)
    kernel = read_text(root / "proc/sys/kernel/osrelease") or platform.release()
    name = release[1] if release else platform.system()
    return f"{name}, kernel {kernel}, {platform.machine()}, Python {platform.python_version()}"


def _memory(root: Path) -> Finding:
    memory = meminfo(root)
    if "MemAvailable" not in memory:
        return note("memory", "not known: this machine has no /proc/meminfo")
    total, free, swap = (memory.get(name, 0) for name in ("MemTotal", "MemAvailable", "SwapTotal"))
    text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free, {swap / 1e9:.1f} GB swap"
    if free < SMALL_MODEL_BYTES:
        advice = f"Close other programs, or take a small model: {call('--model qwen3:0.6b')}"
        return fair("memory", text, advice)
    return good("memory", text)


def _tinygrad() -> Finding:
    try:
        installed = version("tinygrad")
    except PackageNotFoundError:
        installed = "no version"
    if installed == TINYGRAD:
        return good("tinygrad", installed)
    advice = f"Install the version this program is made for: {pip_install(f'tinygrad=={TINYGRAD}')}"
    return bad("tinygrad", f"{installed} is installed, {TINYGRAD} is needed", advice)


def _compiler() -> Finding:
    try:
        problem = unusable_because("CPU")
    except BackendError as error:
        return bad("clang", error.message.rstrip("."), error.hint)
    if problem:
        advice = f"Install clang from your system's packages, or run: {pip_install('ziglang')}"
        return bad("clang", problem, advice)
    return good("clang", "installed")


def kernel_log() -> list[str]:
    """The last 40 lines of the kernel's log that a GPU driver wrote; none if this user may not read the log."""
    try:
        run = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in run.stdout.splitlines() if _GPU_DRIVERS.search(line)][-40:]


def as_text(counter: Counter) -> str:
    """The counter's value, or why there is none."""
    if counter.absent:
        return counter.absent
    if counter.text:
        return counter.text
    limit = f" of {counter.maximum:.0f}" if counter.maximum else ""
    return f"{counter.value:.0f}{limit} {counter.unit}" if counter.value is not None else "not known"
