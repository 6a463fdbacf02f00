"""A digest of the engine's Python source, for the keys of what depends on it but not on a kernel's own text.

Each start needs that of some 350 files before anything else: three system calls for a file, each of which waits for
Python's lock when it is done, if another thread imports modules. In the engine's process that took 105 to 153 ms, so a
fork of it reads them (`read_ahead`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import engine
from engine.system.forked_call import call_in_fork

STEP_SOURCES = "kernels", "formats", "description", "runtime", "targets"
"""The source that says which kernels a step has."""
_KERNEL_SOURCES = "kernels", "targets/nvidia/kernels", "targets/cpu/kernels", "formats"
_LONGEST = 1 << 20  # bytes of a file

_files: dict[str, tuple[str, ...]] = {}  # the Python files below folders, in order
_digests: dict[str, bytes] = {}  # of files
_ahead: list[Callable[[], bytes]] = []  # at most one


@functools.cache
def source_digest(*paths: str) -> str:
    """A digest of the Python source below folders and files of `engine` (default: all that kernels are made of)."""
    while _ahead:
        if sent := _ahead.pop()():
            files, digests = pickle.loads(sent)  # of a fork of this process
            _files.update(files)
            _digests.update(digests)
    digest = hashlib.sha256()
    for name in paths or _KERNEL_SOURCES:
        for file in _sources(str(Path(engine.__file__).parent / name)):
            digest.update(_file_digest(file))
    return digest.hexdigest()


def read_ahead() -> None:
    """Begins to read what a start needs. To be called while this process has one thread."""

    def read() -> bytes:
        source_digest(*STEP_SOURCES, "fixes")
        return pickle.dumps((_files, _digests))

    _ahead.append(call_in_fork(read))


def _sources(path: str) -> tuple[str, ...]:
    """The Python files at or below a path, in order."""
    if path.endswith(".py"):
        return (path,)
    if path not in _files:
        with os.scandir(path) as entries:
            below = sorted((entry.path, entry.is_dir()) for entry in entries)
        folders = [_sources(name) if is_folder else (name,) for name, is_folder in below]
        _files[path] = tuple(name for names in folders for name in names if name.endswith(".py"))
    return _files[path]


def _file_digest(path: str) -> bytes:
    if path not in _digests:
        file = os.open(path, os.O_RDONLY)
        try:
            _digests[path] = hashlib.sha256(os.read(file, _LONGEST)).digest()
        finally:
            os.close(file)
    return _digests[path]
