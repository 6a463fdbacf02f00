"""Caches packed weights on disk, so that the next start reads them instead of repacking the model file.

The cache is off unless `keep_packed` is set in settings.toml: it takes as much disk space again as the model.

A file of the cache is a 24-byte header, the packed streams of a model's matrices one after another, and a table in
JSON: for each matrix the offset and the size of its stream. The header holds a magic number, the offset of the table
and its size; a file that does not end with its table was cut off and is ignored. Files are written under a temporary
name and renamed when they are complete. The name says which model file the weights are from, in which state, and
which version of the packing made them; writing one deletes the older ones of the same model.

Streams are read into memory, not mapped: mapped files have small pages, and decoding from them is a third slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray

from engine.cache.sources import source_digest
from engine.formats.gguf import GGUF
from engine.system.whole_file import open_file, replacing

_MAGIC = b"orinpack"
_HEADER_BYTES = 24  # magic, offset of the table, size of the table: 8 bytes each
_SUFFIX = ".packed"
_READ_BYTES = 1 << 30  # in one system call, which Linux limits to 2 GiB


@dataclass(frozen=True)
class CachedFile:
    path: Path
    size_bytes: int


def folder() -> Path:
    return platformdirs.user_cache_path("orin-chat", appauthor=False) / "packed"


def cached_files(model: Path) -> list[CachedFile]:
    """The complete cache files of a model file."""
    files = []
    for path in sorted(folder().glob(f"{_model_key(model)}*{_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError):
            with open_file(path) as file:
                _read_table(file.fileno())
            files.append(CachedFile(path, path.stat().st_size))
    return files


def delete(model: Path) -> int:
    """Deletes the cache files of a model file, temporary ones too; returns the bytes freed. Raises OSError."""
    freed = 0
    for path in folder().glob(f"{_model_key(model)}-*"):
        freed += path.stat().st_size
        path.unlink()
    return freed


class PackedReader:
    """The cached streams of a model file; false if there are none for `lanes` rows side by side."""

    def __init__(self, file: GGUF, lanes: int) -> None:
        self._fd, self._table = -1, dict[str, tuple[int, int]]()
        with contextlib.suppress(OSError, ValueError):
            with open_file(_path(file, lanes)) as kept:
                self._fd = os.dup(kept.fileno())
            self._table = _read_table(self._fd)

    def __bool__(self) -> bool:
        return bool(self._table)

    def read(self, name: str, out: NDArray[np.uint8]) -> bool:
        """Reads the stream of a matrix into `out`, uint8 (bytes,). False if there is none of that size, or it cannot
        be read; `out` may then be partly overwritten."""
        offset, size = self._table.get(name, (0, -1))
        if size != out.size:
            return False
        done = 0
        while done < size:
            try:
                n = os.preadv(self._fd, [out.data[done : done + _READ_BYTES]], offset + done)
            except OSError:
                return False
            if not n:
                return False
            done += n
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def write(file: GGUF, lanes: int, streams: Mapping[str, NDArray[np.uint8]]) -> bool:
    """Stores the packed streams of a model, uint8 (bytes,) each, by matrix. False if the disk is full or read-only."""
    path = _path(file, lanes)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        delete(file.path)
        with replacing(path) as out:
            out.seek(_HEADER_BYTES)
            table = {}
            for name, stream in streams.items():
                table[name] = out.tell(), stream.size
                out.write(stream.data)
            encoded = json.dumps(table).encode()
            offset = out.tell()
            out.write(encoded)
            out.seek(0)
            out.write(_MAGIC + offset.to_bytes(8, "little") + len(encoded).to_bytes(8, "little"))
            out.flush()
            os.fsync(out.fileno())
        return True
    except OSError:
        return False


def _read_table(fd: int) -> dict[str, tuple[int, int]]:
    """Matrix -> (offset, size) of its stream. Raises ValueError if the file is not complete."""
    header = os.pread(fd, _HEADER_BYTES, 0)
    offset, size = int.from_bytes(header[8:16], "little"), int.from_bytes(header[16:24], "little")
    if header[:8] != _MAGIC or offset + size != os.fstat(fd).st_size:
        raise ValueError("not a complete file of packed weights")
    return {name: (start, n) for name, (start, n) in json.loads(os.pread(fd, size, offset)).items()}


def _model_key(model: Path) -> str:
    return hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]


def _path(file: GGUF, lanes: int) -> Path:
    state = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in file.paths for s in [p.stat()]]
    key = hashlib.sha256(repr((state, lanes, source_digest())).encode()).hexdigest()[:16]
    return folder() / f"{_model_key(file.path)}-{key}{_SUFFIX}"
