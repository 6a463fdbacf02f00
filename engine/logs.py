"""The log files of child processes: where they are, and how large they may grow."""

import contextlib
import os
from pathlib import Path
from typing import IO

import platformdirs

LIMIT_BYTES = 1 << 20


def log_path(name: str) -> Path:
    """The log file for the child process `name`, in the user's log folder."""
    return platformdirs.user_log_path("orin-chat", appauthor=False) / f"{name}.log"


def open_log(path: Path) -> IO[bytes]:
    """The log file, for appending; only its owner can read it. /dev/null if it cannot be written."""
    trim_log(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
    except OSError:
        return Path(os.devnull).open("wb")


def trim_log(path: Path) -> None:
    """Empties the log if it is larger than LIMIT_BYTES."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > LIMIT_BYTES:
            os.truncate(path, 0)
