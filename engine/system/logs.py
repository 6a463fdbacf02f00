"""The log files of child processes, and of what a full screen keeps out: where they are, and how large they may
grow."""

import contextlib
import os
import re
from pathlib import Path
from typing import IO

import platformdirs

from engine.system.whole_file import open_file

LIMIT_BYTES = 1 << 20
_TAIL_BYTES = 4096
_MOST_CHARACTERS = 200
_ERROR = re.compile(r"^[ \t].*\n(?:\w+\.)*(\w+(?:Error|Exception))\b(.*)$", re.MULTILINE)
"""The line after the calls of a traceback. Those that follow may be of any text."""
_SAYS_WHY = {
    "ImportError",
    "ModuleNotFoundError",
    "OSError",
    "FileNotFoundError",
    "PermissionError",
    "MemoryError",
}
"""Errors whose text is quoted: it names modules, files and the system's reasons. That of others may hold a piece of a
prompt."""


def log_path(name: str) -> Path:
    """The log file of `name`, in the user's log folder."""
    return platformdirs.user_log_path("orin-chat", appauthor=False) / f"{name}.log"


def open_log(path: Path) -> IO[bytes]:
    """The log file, for appending; only its owner can read it. /dev/null if it cannot be written."""
    trim_log(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600), "ab")
    except OSError:
        return Path(os.devnull).open("wb")


def screen_log() -> IO[bytes]:
    """The log of what a screen keeps out, as `open_log` opens it."""
    return open_log(log_path("screen"))


def trim_log(path: Path) -> None:
    """Empties the log if it is larger than LIMIT_BYTES."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > LIMIT_BYTES:
            os.truncate(path, 0)


def log_bytes(path: Path) -> int:
    """How long the log is; 0 if there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def last_error(path: Path, start: int) -> str:
    """The last error in the log after `start` bytes, in one line: its class, and its text if that can hold nothing that
    a user wrote. "" if there is none."""
    try:
        with open_file(path) as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
            tail = log.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    errors = _ERROR.findall(tail)
    if not errors:
        return ""
    name, text = errors[-1]
    line = "".join(c for c in (name + text if name in _SAYS_WHY else name) if c.isprintable())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}\N{HORIZONTAL ELLIPSIS}"
