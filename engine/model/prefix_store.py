"""Keeps the KV cache of conversations on disk, so that a long one can be opened again without prefill.

A file holds the keys and values of CHUNK tokens. Its name is a digest of the model file, of what the runner exports and
of all tokens up to the end of the chunk, so a conversation finds its own chunks, and those of any other that begins the
same way. A file is 24 bytes (a magic number, the first token for which layers with a sliding window are exported, the
CRC-32 of the rest), the chunk's tokens, int32 (CHUNK,), and the export of the runner. Files are written under a
temporary name and then renamed; a damaged one is deleted. The least recently used files beyond a limit are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.formats.gguf import GGUF
from engine.formats.kv_format import QUANT_BLOCK
from engine.model.prefix_folder import folder

CHUNK = 512
"""Tokens of a file."""

_HEADER = struct.Struct("<8sqq")  # magic, first token of windows, CRC-32
_MAGIC = b"orinkv01"
_SUFFIX = ".kv"


def export_layout(layers: Iterable[tuple[int, int, int]]) -> str:
    """What an export holds of layers with so many key heads, of so many elements, and a window of so many tokens (0:
    none). "" if it cannot: a head's elements must be whole blocks."""
    layers = list(layers)
    return "" if any(dim % QUANT_BLOCK for _, dim, _ in layers) else repr(layers)


@dataclass(frozen=True)
class StoredChunk:
    """`window_from`: the first token for which layers with a sliding window are exported."""

    path: Path
    window_from: int

    def read(self, tokens: Sequence[int]) -> NDArray[np.uint8] | None:
        """The export of a chunk of `tokens`; None if the file is damaged or gone."""
        try:
            data = np.fromfile(self.path, np.uint8)  # several threads do this at once
            _, _, crc = _HEADER.unpack(data[: _HEADER.size].tobytes())
            body, n = data[_HEADER.size :], 4 * len(tokens)
            if zlib.crc32(body.data) == crc and np.array_equal(body[:n].view(np.int32), tokens):
                return body[n:]
            self.path.unlink()
        except (OSError, struct.error, ValueError):
            pass
        return None


class PrefixStore:
    """The files of one model, as a runner with a `layout` exports it."""

    def __init__(self, file: GGUF, layout: str, limit_bytes: int) -> None:
        state = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in file.paths for s in [p.stat()]]
        self._key = hashlib.sha256(repr((state, layout)).encode()).digest()
        self._limit_bytes, self._writable = limit_bytes, True

    def find(self, tokens: Sequence[int]) -> list[StoredChunk]:
        """The chunks of the beginning of `tokens` that are stored without a gap."""
        found = []
        for path in self._paths(tokens):
            try:
                with path.open("rb") as file:
                    magic, window_from, _ = _HEADER.unpack(file.read(_HEADER.size))
                if magic != _MAGIC:
                    break
                os.utime(path)
            except (OSError, struct.error):
                break
            found.append(StoredChunk(path, window_from))
        return found

    def write(self, tokens: Sequence[int], window_from: int, export: NDArray[np.uint8]) -> bool:
        """Stores the last chunk of `tokens`, which are whole chunks. False if the disk is full or read-only; then
        nothing more is written."""
        *_, path = self._paths(tokens)
        ids = np.asarray(tokens[-CHUNK:], np.int32).tobytes()
        crc, temporary = zlib.crc32(export.data, zlib.crc32(ids)), None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._trim(export.nbytes)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # for the user alone
                temporary = Path(file.name)
                file.write(_HEADER.pack(_MAGIC, window_from, crc) + ids)
                file.write(export.data)
            temporary.replace(path)
        except OSError:
            self._writable = False
            if temporary:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        return self._writable

    @property
    def writable(self) -> bool:
        """Whether a write may succeed."""
        return self._writable

    def _paths(self, tokens: Sequence[int]) -> Iterator[Path]:
        """The file of each whole chunk."""
        digest = self._key
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            ids = np.asarray(tokens[end - CHUNK : end], np.int32).tobytes()
            digest = hashlib.sha256(digest + ids).digest()
            yield folder() / f"{digest.hex()}{_SUFFIX}"

    def _trim(self, wanted_bytes: int) -> None:
        """Makes room for so many bytes. Raises OSError."""
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder()) if entry.is_file()]
        total_bytes = wanted_bytes
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
            total_bytes += stat.st_size
            if total_bytes > self._limit_bytes:
                Path(path).unlink(missing_ok=True)
