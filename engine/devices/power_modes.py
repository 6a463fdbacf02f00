"""The power modes of a Jetson: nvpmodel's, which limit clocks and turn cores and multiprocessors off.

`nvpmodel -m ID` sets one, for root only. Some need a restart; then it asks, is told no, and the mode stays. Sources:
NVIDIA's Jetson Linux Developer Guide, "Supported Modes and Power Efficiency", and the commands' own help.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.devices.system_files import read_text
from engine.errors import UsageError

_CONF = "etc/nvpmodel.conf"
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PowerMode:
    id: int
    name: str


def power_modes(root: Path = Path("/")) -> list[PowerMode]:
    """The power modes in /etc/nvpmodel.conf; [] on a machine without this file."""
    found = re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", read_text(root / _CONF))
    return [PowerMode(int(number), name) for number, name in found]


def current_mode() -> int | None:
    """The id of the mode; None if nvpmodel does not tell."""
    said = _run("nvpmodel", "-q")
    numbers = re.findall(r"^\d+$", said, re.MULTILINE)
    return int(numbers[-1]) if numbers else None


def set_mode(mode: int) -> str:
    """Sets the mode and the highest clocks that it allows. Returns why it was not set; "" if it was."""
    said = _run("nvpmodel", "-m", str(mode))
    if current_mode() != mode:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        asks = any("reboot" in line.lower() for line in lines)
        return "it needs a restart" if asks else (lines[-1] if lines else "nvpmodel does not set it")
    _run("jetson_clocks")
    return ""


@contextmanager
def kept_mode(modes: Sequence[PowerMode], is_root: bool) -> Iterator[None]:
    """The mode and the clocks are as before in the end. Raises UsageError where modes cannot be set."""
    if not modes:
        raise UsageError("This machine has no power modes.", "nvpmodel of a Jetson has them.")
    before = current_mode()
    if not is_root or before is None:
        raise UsageError("Only root may set power modes.", "Start it with sudo, and name --model FILE.")
    with tempfile.TemporaryDirectory() as folder:
        clocks = f"{folder}/clocks.conf"
        _run("jetson_clocks", "--store", clocks)
        try:
            yield
        finally:
            _run("nvpmodel", "-m", str(before))
            _run("jetson_clocks", "--restore", clocks)


def _run(*command: str) -> str:
    """What a program says, on both of its outputs; its failure if it cannot run."""
    try:
        done = subprocess.run(
            command, input="no\n", capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {type(error).__name__}"
    return done.stdout + done.stderr
