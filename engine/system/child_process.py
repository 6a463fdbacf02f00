"""Child processes: runs this program's modules, ends a child together with its children, and names how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from typing import Any

_PROGRAM = Path(__file__).resolve().parents[2]  # the checkout, or the folder of installed packages


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` of this program with this Python.

    -P keeps the current folder out of the module search path: a user's own ./engine would be imported instead."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment in which `module_command` finds this program, whether it is installed or a checkout, and keeps
    bytecode where this process does. What the user's streams are encoded in is not for those between processes."""
    path = os.pathsep.join(filter(None, [str(_PROGRAM), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONIOENCODING", None)
    if sys.pycache_prefix:
        environment["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if sys.dont_write_bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return environment


def signal_group(leader: int, number: signal.Signals) -> None:
    """Sends a signal to a process and its children. `leader` is the id of the process that leads their group.
    Does nothing if they have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: zombies (macOS)
        os.killpg(leader, number)


def kill(child: subprocess.Popen[Any]) -> None:
    """Kills a child, closes its pipes and waits for its end."""
    child.kill()
    with contextlib.suppress(OSError), child:  # leaving it closes the pipes and waits
        pass


def end_children() -> None:
    """Kills the children of this process and waits for their ends: a program that takes its place (exec) would not know
    them, and they would stay as zombies. Does nothing on a kernel that does not list them."""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended, or another one has waited for the child
            for child in map(int, children.read_text().split()):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def how_it_ended(code: int) -> str:
    """What subprocess's return code says: "signal 9, SIGKILL" or "exit status 1"."""
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "unnamed"
    return f"signal {-code}, {name}"
