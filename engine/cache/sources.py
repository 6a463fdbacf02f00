"""A digest of the engine's Python source, for the keys of what depends on it but not on a kernel's own text.

Each start reads some 350 files for it before anything else, three system calls for each: 8 ms on an H200's machine, if
no other thread has Python's lock.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import engine

STEP_SOURCES = "kernels", "formats", "description", "runtime", "targets"
"""The source that says which kernels a step has."""
_KERNEL_SOURCES = "kernels", "targets/nvidia/kernels", "targets/cpu/kernels", "formats"
_LONGEST = 1 << 20  # bytes of a file


@functools.cache
def source_digest(*paths: str) -> str:
    """A digest of the Python source below folders and files of `engine` (default: all that kernels are made of)."""
    digest = hashlib.sha256()
    for name in paths or _KERNEL_SOURCES:
        for file in _sources(str(Path(engine.__file__).parent / name)):
            digest.update(_file_digest(file))
    return digest.hexdigest()


@functools.cache
def _sources(path: str) -> tuple[str, ...]:
    """The Python files at or below a path, in order."""
    if path.endswith(".py"):
        return (path,)
    with os.scandir(path) as entries:
        below = sorted((entry.path, entry.is_dir()) for entry in entries)
    folders = (_sources(name) if is_folder else (name,) for name, is_folder in below)
    return tuple(name for names in folders for name in names if name.endswith(".py"))


@functools.cache
def _file_digest(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return hashlib.sha256(os.read(file, _LONGEST)).digest()
    finally:
        os.close(file)
