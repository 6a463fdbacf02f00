"""A temporary folder that stands in for the user's cache and state where these cannot be written: a home folder that is
read-only, full or not there."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

_PAGE = bytes(4096)


def stand_in_where_needed() -> str:
    """Sets XDG_CACHE_HOME and XDG_STATE_HOME, for this process and its children, to a folder of the user's own where
    nothing can be written, and HOME where there is none. What the old folders hold can still be read. Returns a
    sentence that says so, or ""."""
    flaw, folder = "", None
    try:
        Path.home()
    except RuntimeError:  # a user id without an account
        if folder := _stand_in():
            os.environ["HOME"] = str(folder)
            flaw = "There is no home folder."
    for variable, old in {
        "XDG_CACHE_HOME": platformdirs.user_cache_path("orin-chat", appauthor=False),
        "XDG_STATE_HOME": platformdirs.user_state_path("orin-chat", appauthor=False),
    }.items():
        if (reason := _flaw(old)) and (folder := folder or _stand_in()):
            new = folder / variable
            _link(old, new / "orin-chat")
            if variable == "XDG_CACHE_HOME":
                _link(old.with_name("huggingface"), new / "huggingface")
            os.environ[variable] = str(new)
            flaw = flaw or f"{old} cannot be written: {reason}."
    return flaw and f"{flaw} {folder} stands in for it."


def _flaw(folder: Path) -> str:
    """Why no file can be written in a folder, or in the first one above it that is there; "" if one can."""
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PAGE)
            file.flush()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _stand_in() -> Path | None:
    """A folder that only the user can open, the same one in every run. None if there is no place for it."""
    for parent in _temporary_folders():
        folder = Path(parent, f"orin-chat-{os.getuid()}")
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            state = folder.lstat()
            private = state.st_uid == os.getuid() and not state.st_mode & 0o077
            if stat.S_ISDIR(state.st_mode) and private and not _flaw(folder):
                return folder
    return None


def _temporary_folders() -> Iterator[str]:
    with contextlib.suppress(OSError):  # none that can be written
        yield tempfile.gettempdir()
    yield "/dev/shm"


def _link(old: Path, new: Path) -> None:
    """Links all that is in `old` into `new`, but for logs, which are to be written."""
    with contextlib.suppress(OSError):
        new.mkdir(mode=0o700, parents=True, exist_ok=True)
        for link in new.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
        for entry in old.iterdir():
            if entry.name != "log" and not (new / entry.name).exists():
                (new / entry.name).symlink_to(entry)
