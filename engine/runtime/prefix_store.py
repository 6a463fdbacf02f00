"""Keeps the KV cache of conversations on disk, so that a long one can be opened again without prefill.

A file holds the keys and values of CHUNK tokens. Its name is a digest of the model file, of what the runner exports and
of all tokens up to the end of the chunk, so a conversation finds its own chunks, and those of any other that begins the
same way. A file is 24 bytes (a magic number, the first token for which layers with a sliding window are exported, the
CRC-32 of all else), the chunk's tokens, int32 (CHUNK,), and the export of the runner. Files are written under a
temporary name and then renamed; a damaged one is deleted. The least recently used files beyond a limit are deleted.

A recurrent state is that after some number of tokens, not after a chunk. Its file is named after the last whole chunk
before it, that number, and the CRC-32 of the tokens after that chunk. The number takes the place of the first token of
windows. The file's tokens are those after the chunk, and its export is the state and then a chunk that begins with
them.
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

from engine.cache.disk_cache import trim
from engine.formats.gguf import GGUF
from engine.formats.kv_format import QUANT_BLOCK
from engine.runtime.prefix_folder import folder
from engine.system.whole_file import open_file

CHUNK = 512
"""Tokens of a file."""

_FORMAT = 2  # of what files hold

_HEADER, _CRC = struct.Struct("<8sq"), struct.Struct("<q")  # magic, first token of windows; CRC-32
_TOKENS_AT = _HEADER.size + _CRC.size
_MAGIC, _STATE_MAGIC = b"orinkv02", b"orinst02"
_SUFFIX, _STATE_SUFFIX = ".kv", ".state"


def export_layout(layers: Iterable[tuple[int, int, int]], states: str) -> str:
    """What an export holds of layers with so many key heads, of so many elements, and a window of so many tokens (0:
    none), and of recurrent `states` ("": none). "" if it cannot: a head's elements must be whole blocks, and a layer
    with a window cannot go back to where a state is."""
    layers = list(layers)
    if any(dim % QUANT_BLOCK for _, dim, _ in layers) or (states and any(window for *_, window in layers)):
        return ""
    return repr(layers) + states


@dataclass(frozen=True)
class StoredChunk:
    """`window_from`: the first token for which layers with a sliding window are exported."""

    path: Path
    window_from: int

    def read(self, tokens: Sequence[int]) -> NDArray[np.uint8] | None:
        """The export of a chunk of `tokens`; None if the file is damaged or gone."""
        return _read(self.path, tokens)


@dataclass(frozen=True)
class StoredState:
    """The state after `length` tokens."""

    path: Path
    length: int

    def read(
        self, tokens: Sequence[int], state_bytes: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
        """The state after the first of `tokens`, and the chunk of those after whole chunks; None if the file is damaged
        or gone."""
        with contextlib.suppress(OSError):
            os.utime(self.path)
        data = _read(self.path, _after_chunks(tokens[: self.length]))
        return None if data is None else (data[:state_bytes], data[state_bytes:])


def _after_chunks(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens after the whole chunks."""
    return tokens[len(tokens) // CHUNK * CHUNK :]


def _state_path(chunk: Path, tokens: Sequence[int]) -> Path:
    """The file of the state after `tokens`, whose last whole chunk is in a file of that name."""
    crc = zlib.crc32(np.asarray(_after_chunks(tokens), np.int32).tobytes())
    return chunk.with_name(f"{chunk.stem}-{len(tokens)}-{crc:08x}{_STATE_SUFFIX}")


def _read(path: Path, tokens: Sequence[int]) -> NDArray[np.uint8] | None:
    """What a file holds after its `tokens`; None if it is damaged, and then deleted, or gone."""
    try:
        with open_file(path) as file:
            data = np.fromfile(file, np.uint8)  # several threads do this at once
        [crc] = _CRC.unpack(data[_HEADER.size : _TOKENS_AT].tobytes())
        body, n = data[_TOKENS_AT:], 4 * len(tokens)
        if zlib.crc32(body.data, zlib.crc32(data[: _HEADER.size].data)) == crc and np.array_equal(
            body[:n].view(np.int32), tokens
        ):
            return body[n:]
        path.unlink()
    except (OSError, struct.error, ValueError):
        pass
    return None


class PrefixStore:
    """The files of one model, as a runner with a `layout` exports it."""

    def __init__(self, file: GGUF, layout: str, limit_bytes: int) -> None:
        state = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in file.paths for s in [p.stat()]]
        self._key = hashlib.sha256(repr((state, layout, _FORMAT)).encode()).digest()
        self._limit_bytes, self._writable = limit_bytes, True

    def find(self, tokens: Sequence[int]) -> list[StoredChunk]:
        """The chunks of the beginning of `tokens` that are stored without a gap."""
        found = []
        for path in self._paths(tokens):
            try:
                with open_file(path) as file:
                    magic, window_from = _HEADER.unpack(file.read(_HEADER.size))
            except (OSError, struct.error):
                break
            if magic != _MAGIC:
                break
            with contextlib.suppress(OSError):
                os.utime(path)
            found.append(StoredChunk(path, window_from))
        return found

    def write(self, tokens: Sequence[int], window_from: int, export: NDArray[np.uint8]) -> bool:
        """Stores the last chunk of `tokens`, which are whole chunks. False if the disk is full or read-only; then
        nothing more is written."""
        *_, path = self._paths(tokens)
        return self._write(path, _MAGIC, window_from, tokens[-CHUNK:], export)

    def states(self, tokens: Sequence[int]) -> list[StoredState]:
        """The states after beginnings of `tokens` that are stored, the longest first."""
        stored, found = sorted(folder().glob(f"*{_STATE_SUFFIX}")), []
        chunks = {path.stem: path for path in self._paths(tokens)} if stored else {}
        for path in stored:
            chunk, _, rest = path.stem.partition("-")
            number = rest.partition("-")[0]
            length = int(number) if number.isdecimal() else 0
            is_part = chunk in chunks and CHUNK <= length <= len(tokens)
            if is_part and path == _state_path(chunks[chunk], tokens[:length]):
                found.append(StoredState(path, length))
        return sorted(found, key=lambda state: state.length, reverse=True)

    def write_state(self, tokens: Sequence[int], state: NDArray[np.uint8], tail: NDArray[np.uint8]) -> bool:
        """Stores the state after `tokens`, a chunk or more, with the chunk of those after whole ones. It replaces those
        after beginnings of `tokens`. False as for `write`."""
        *_, chunk = self._paths(tokens)
        path, rest = _state_path(chunk, tokens), _after_chunks(tokens)
        is_written = self._write(path, _STATE_MAGIC, len(tokens), rest, state, tail)
        for other in self.states(tokens) if is_written else ():
            if other.path != path:
                with contextlib.suppress(OSError):
                    other.path.unlink(missing_ok=True)
        return is_written

    def _write(
        self, path: Path, magic: bytes, number: int, tokens: Sequence[int], *exports: NDArray[np.uint8]
    ) -> bool:
        ids, temporary = np.asarray(tokens, np.int32).tobytes(), None
        header = _HEADER.pack(magic, number)
        crc = zlib.crc32(header + ids)
        for export in exports:
            crc = zlib.crc32(export.data, crc)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            trim(path.parent, self._limit_bytes - sum(export.nbytes for export in exports))
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # for the user alone
                temporary = Path(file.name)
                file.write(header + _CRC.pack(crc) + ids)
                for export in exports:
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
