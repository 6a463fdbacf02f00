"""Embeddings of pictures on disk, so that a chat that is opened again need not encode its pictures again.

On a CPU a picture may take twenty seconds, and the conversation around it is mostly too short for `prefix_store`.
The files lie beside its files, count for the same limit, and are deleted with them. A file is the SHA-256 digest of the
rest, the rows and columns, int32, and the embeddings, float32. Its name is a digest of the encoder and of the pixels.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np

from engine.cache.disk_cache import trim
from engine.runtime.pictures import Floats, PictureEncoder, Pixels, Progress
from engine.runtime.prefix_folder import folder
from engine.system.whole_file import read_file, write_whole

LEAST_S = 0.3
"""A picture that took less is encoded again."""
_FORMAT = 1  # of what an encoder makes of pixels
_DIGEST_BYTES = 32


class KeptEmbeddings:
    """Implements `PictureEncoder`: what `encoder` gives, or has given before. `identity`: of its file and device;
    `limit_bytes`: of the folder."""

    def __init__(self, encoder: PictureEncoder, identity: str, limit_bytes: int) -> None:
        self._encoder, self._identity, self._limit_bytes = encoder, identity, limit_bytes

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """See `PictureEncoder`."""
        key = hashlib.sha256(f"{_FORMAT} {self._identity} {[rgb.shape for rgb in rgbs]}".encode())
        for rgb in rgbs:
            key.update(np.ascontiguousarray(rgb).data)
        path = folder() / f"{key.hexdigest()}.seen"
        if (known := _read(path)) is not None:
            return known
        work, took_s = self._encoder.encode(rgbs), 0.0
        while True:
            began_s = time.perf_counter()
            try:
                progress = next(work)
            except StopIteration as end:
                embeddings: Floats = end.value
                break
            took_s += time.perf_counter() - began_s
            yield progress
        if took_s + time.perf_counter() - began_s >= LEAST_S:
            self._write(path, embeddings)
        return embeddings

    def preparations(self) -> Sequence[Callable[[], None]]:
        """See `PictureEncoder`."""
        return self._encoder.preparations()

    def _write(self, path: Path, embeddings: Floats) -> None:
        content = np.array(embeddings.shape, np.int32).tobytes() + embeddings.astype(np.float32).tobytes()
        if len(content) < self._limit_bytes:
            with contextlib.suppress(OSError):  # the disk is full or read-only
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                trim(path.parent, self._limit_bytes - len(content))
                write_whole(path, hashlib.sha256(content).digest() + content)


def _read(path: Path) -> Floats | None:
    """What a file holds; None if it is damaged, and then deleted, or not there."""
    try:
        data = read_file(path)
        content = data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == data[:_DIGEST_BYTES]:
            path.touch()  # the least recently used are deleted first
            rows, columns = np.frombuffer(content, np.int32, 2).tolist()
            return np.frombuffer(content, np.float32, offset=8).reshape(rows, columns)
        path.unlink(missing_ok=True)
    except (OSError, ValueError):
        pass
    return None
