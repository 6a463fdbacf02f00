"""Packed weights, kept on disk on request (`keep_packed` in settings.toml), so that the next start reads them as they
are in place of packing them anew. On a disk they take as much room again as the model.

A file holds the streams of a model's matrices, one after another, and then a table of them: name, where, how
many bytes. It begins with the place of the table, and one that does not end with its table was cut off. It is
written aside and renamed when it is whole, so that it is there as a whole or not at all. Its name says which file
it was made of, in which state, and by which version of the packing; others of the same file are deleted when
it is written.

Streams are read, not mapped: pages of a mapped file are small, and decoding from them is a third slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray

from engine.disk_cache import source_version
from engine.formats.gguf import GGUF

_MAGIC = b"orinpack"
_HEAD_BYTES = 24  # magic, place of the table, its bytes
_ENDING = ".packed"


@dataclass(frozen=True)
class PackedFile:
    """A kept file: of which model file, and how large it is."""

    path: Path
    model: Path
    size_bytes: int


def folder() -> Path:
    return platformdirs.user_cache_path("orin-chat", appauthor=False) / "packed"


def kept(model: Path | None = None) -> list[PackedFile]:
    """What is kept of a model file, or of all: whole files only."""
    found = []
    for path in sorted(folder().glob(f"{_name(model) if model else ''}*{_ENDING}")):
        with contextlib.suppress(OSError, ValueError):
            with path.open("rb") as file:
                table = _table(file.fileno())
            found.append(PackedFile(path, Path(str(table["model"])), path.stat().st_size))
    return found


def forget(model: Path) -> int:
    """Deletes what is kept of a model file; returns how many bytes that freed. Raises OSError."""
    freed = 0
    for path in folder().glob(f"{_name(model)}-*"):
        freed += path.stat().st_size
        path.unlink()
    return freed


class PackedReader:
    """The kept streams of a file, if there are any: `read` says for each whether it is here."""

    def __init__(self, file: GGUF, lanes: int) -> None:
        self._fd, self._streams = -1, dict[str, list[int]]()
        with contextlib.suppress(OSError, ValueError):
            self._fd = os.open(_path(file, lanes), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self._streams = _table(self._fd)["streams"]

    def __bool__(self) -> bool:
        return bool(self._streams)

    def read(self, name: str, out: NDArray[np.uint8]) -> bool:
        """Reads the stream of a matrix into `out`, uint8 (bytes,); False where that is not what is kept."""
        at, n_bytes = self._streams.get(name, (0, -1))
        if n_bytes != out.size:
            return False
        done = 0
        while done < n_bytes:
            try:
                got = os.preadv(self._fd, [out.data[done : done + (1 << 30)]], at + done)
            except OSError:
                return False
            if not got:
                return False
            done += got
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def write(file: GGUF, lanes: int, streams: Mapping[str, NDArray[np.uint8]]) -> bool:
    """Keeps the streams of a file; False where the disk does not take them."""
    path = _path(file, lanes)
    temporary: Path | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in path.parent.glob(f"{_name(file.path)}-*"):
            old.unlink()
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{_name(file.path)}-", delete=False) as out:
            temporary = Path(out.name)
            out.seek(_HEAD_BYTES)
            places = {}
            for name, stream in streams.items():
                places[name] = [out.tell(), stream.size]
                out.write(stream.data)
            table = json.dumps({"model": str(file.path.resolve()), "streams": places}).encode()
            at = out.tell()
            out.write(table)
            out.seek(0)
            out.write(_MAGIC + at.to_bytes(8, "little") + len(table).to_bytes(8, "little"))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
        return True
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return False


def _table(fd: int) -> dict[str, dict[str, list[int]]]:
    """Raises ValueError where the file is not whole."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    at, n_bytes = int.from_bytes(head[8:16], "little"), int.from_bytes(head[16:24], "little")
    if head[:8] != _MAGIC or at + n_bytes != os.fstat(fd).st_size:
        raise ValueError("not whole")
    table: dict[str, dict[str, list[int]]] = json.loads(os.pread(fd, n_bytes, at))
    return table


def _name(model: Path) -> str:
    return hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]


def _path(file: GGUF, lanes: int) -> Path:
    state = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in file.paths for s in [p.stat()]]
    key = hashlib.sha256(repr((state, lanes, source_version())).encode()).hexdigest()[:16]
    return folder() / f"{_name(file.path)}-{key}{_ENDING}"
