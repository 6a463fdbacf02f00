"""Reads GGUF model files: little-endian, versions 2 and 3, single or split. Weights are mapped into memory; what stands
before them is read, since a map of a file that is cut short, or whose disk fails, ends the process.

Nothing in a file is trusted: each count is compared with the size of the file before memory is allocated for it.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. How a model is split into several files:
tools/gguf-split in llama.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
import stat
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.formats.foreign_files import guess_kind
from engine.formats.ggml_types import FORK, GGML_TYPES, I2_S, REMOVED
from engine.formats.ollama_names import usual_names
from engine.formats.string_array import StringArray, follow

# gguf_metadata_value_type -> type, as `struct` and numpy write it; the other three types are below
_SCALARS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

_MAX_DIMENSIONS = 4  # of a tensor: GGML_MAX_DIMS in ggml.h
_MAX_NESTING = 4  # levels of arrays in arrays
_MAX_ENTRIES = 1 << 14  # metadata values, and tensors: published models have at most some thousands
_PIECE_BYTES = 1 << 20  # of the metadata are read at once
_MAX_HEAD_BYTES = 1 << 28  # published models have at most some 30 MB
_MAX_STRINGS = 1 << 20  # in all arrays: published models have at most 780,000, tokens and merges
_DOWNLOAD_AGAIN = "Download it again."
_NOT_WHOLE = "If it is still being downloaded, wait until it is whole; if not, download it again."
_SPLIT_NAME = re.compile(
    r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.DOTALL | re.IGNORECASE
)
_CUT_NAME = re.compile(r".*(\.part\d+of\d+|-split-[a-z])", re.DOTALL | re.IGNORECASE)
"""Names of pieces of large files, which some publish without a format of their own."""
_JOIN = "It is a piece of a larger file. Join all pieces, in order, with cat, and open the result."

_T = TypeVar("_T")
_D = TypeVar("_D")
_REQUIRED = object()


class _MappedFile(mmap.mmap):
    """A file, mapped read-only."""

    path: Path
    _fd = -1

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises OSError, and ValueError for an empty file."""
        with path.open("rb") as file:
            mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.path, mapped._fd = path, os.dup(file.fileno())
        return mapped

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read_into(self, start: int, out: memoryview) -> None:
        """See `TensorInfo.read_into`."""
        done = 0
        while done < len(out):
            try:
                n = os.preadv(self._fd, [out[done:]], start + done)
            except OSError as error:
                problem = f"{printable(self.path.name)} could not be read: {error.strerror}."
                raise ModelFileError(problem, "Check the disk, or the network that it is on.") from error
            if not n:
                raise damaged(self.path, "it was cut short while it was read")
            done += n

    def release(self, start: int, n_bytes: int, keep_cached: bool) -> None:
        """See `TensorInfo.release`."""
        if hasattr(mmap, "MADV_DONTNEED"):
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.madvise(mmap.MADV_DONTNEED, page, start + n_bytes - page)
        if not keep_cached and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), start, n_bytes, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is that of numpy and PyTorch, rows first: the reverse of the order in the file. `type` is
    the id in `GGML_TYPES`."""

    name: str
    shape: tuple[int, ...]
    type: int
    n_bytes: int
    _buffer: _MappedFile
    _offset: int

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type].name

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the tensor, uint8 (n_bytes,): a read-only view of the file, not a copy."""
        return np.frombuffer(self._buffer, np.uint8, self.n_bytes, self._offset)

    def part(self, start: int, n_bytes: int) -> NDArray[np.uint8]:
        """Some bytes of the tensor, uint8 (n_bytes,), as `data`, but marked as writable: tinygrad's CUDA device copies
        only from such memory, though it just reads it."""
        buffer = (ctypes.c_uint8 * n_bytes).from_address(self.data.ctypes.data + start)
        return np.frombuffer(memoryview(buffer), np.uint8)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of the tensor from `start` on, without the map: threads do so faster. Raises
        ModelFileError."""
        self._buffer.read_into(self._offset + start, out)

    def read(self) -> NDArray[np.uint8]:
        """A copy of `data`, read without the map. Raises ModelFileError."""
        read = np.empty(self.n_bytes, np.uint8)
        self.read_into(0, read.data)
        return read

    def release(self, start: int, n_bytes: int, keep_cached: bool) -> None:
        """Removes pages of the tensor, `n_bytes` from `start` on, from this process's memory. They are read again when
        they are used again: from the system's cache of files if they are `keep_cached`, else from the disk, and then
        they leave the memory to others at once."""
        self._buffer.release(self._offset + start, n_bytes, keep_cached)

    def place(self) -> tuple[str, int]:
        """The file that it is in, and where it begins there: tensors in this order follow each other."""
        return str(self._buffer.path), self._offset

    def __repr__(self) -> str:
        return f"<{self.name!r} {self.type_name} {self.shape}>"


class GGUF:
    """An open model file. Any part of a split model (`…-00001-of-00003.gguf`) opens all of them; `metadata` is that of
    the first part.

    Values of `metadata` are Python's int, float, bool and str; arrays are read-only numpy arrays, `StringArray`, or
    lists of arrays. `paths` are all parts, and `file_bytes` is the size of all of them. Raises ModelFileError if
    anything is wrong with the file.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.paths = _parts(self.path)
        readers = [_FileReader(part) for part in self.paths]
        self.metadata = readers[0].metadata
        self.file_bytes = sum(reader.size for reader in readers)
        if len(readers) == 1 and self.get("split.count", int, 1) > 1:
            readers[0].fail(
                f"is one part of {self.get('split.count', int)}, and its name does not say which.",
                "Give all parts the names that they were published with, such as name-00001-of-00003.gguf.",
            )
        tensors: dict[str, TensorInfo] = {}
        for number, reader in enumerate(readers):
            split = (reader.metadata.get("split.no"), reader.metadata.get("split.count"))
            if len(readers) > 1 and split != (number, len(readers)):
                reader.fail("is not the part of a split model that its name says it is.", _DOWNLOAD_AGAIN)
            for tensor in reader.tensors:
                if tensor.name in tensors:
                    reader.fail(f'has a second tensor named "{printable(tensor.name)}".', _DOWNLOAD_AGAIN)
                tensors[tensor.name] = tensor
        count = self.get("split.tensors.count", int, len(tensors)) if len(readers) > 1 else len(tensors)
        if count != len(tensors):
            readers[0].fail(f"promises {count} tensors; its parts have {len(tensors)}.", _DOWNLOAD_AGAIN)
        self.metadata, self.tensors = usual_names(self.metadata, tensors)

    @overload
    def get(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: _D) -> _T | _D: ...
    def get(self, key: str, kind: type[_T], default: object = _REQUIRED) -> object:
        """The metadata value of `key`, or `default` if the file has none. `kind` is int, float (which takes integers
        too), bool, str, np.ndarray or StringArray.

        Raises ModelFileError, naming the key, if the value has another type, or is missing and has no default.
        """
        value = self.metadata.get(key, default)
        if value is default and value is not _REQUIRED:
            return value
        if kind is float and type(value) is int:
            return float(value)
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
        wrong = "is missing" if value is _REQUIRED else f"is {type(value).__name__}, not {kind.__name__}"
        raise ModelFileError(
            f'{printable(self.path.name)} is not a complete model: its metadata key "{printable(key)}" {wrong}.',
            "Get another copy of the model, or convert it again.",
        )

    def close(self) -> None:
        """Closes the file. Arrays that were taken from it stay valid and keep it mapped."""
        self.metadata, self.tensors = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def printable(text: str) -> str:
    """Untrusted text for use in a message: one line of at most 80 characters, without control characters."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:200])
    return text if len(text) <= 80 else f"{text[:79]}…"


def damaged(path: Path, problem: str) -> ModelFileError:
    """The error for a model file that is readable, but whose contents cannot be right."""
    return ModelFileError(f"{printable(path.name)} is damaged: {problem}.", _DOWNLOAD_AGAIN)


def _parts(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of. A file is split if its name and its metadata say so."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match or int(match["count"]) < 2 or "split.count" not in _FileReader(path).metadata:
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}{match['end']}") for no in range(1, count + 1)
    ]
    if missing := next((part for part in parts if not part.exists()), None):
        raise ModelFileError(
            f"{printable(path.name)} is one of {count} parts, and {printable(missing.name)} is not beside it.",
            "Download all parts into one folder.",
        )
    return parts


class _FileReader:
    """Reads one file from front to back: `metadata`, `tensors`, and its `size` in bytes. `buffer` has its beginning, of
    which `n_read` bytes are read: as many as were needed."""

    def __init__(self, path: Path) -> None:
        self.path, self.pos, self.n_read = path, 0, 0
        try:
            if path.is_dir():
                self.fail("is a folder, not a model file.", "Give the path of a .gguf file.")
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                self.fail(
                    "is not a file, but a pipe, a socket or a device.", "Give the path of a .gguf file."
                )
            if not status.st_size:
                self.fail("is empty.", _NOT_WHOLE)
            self.mapped = _MappedFile.open(path)
        except FileNotFoundError:
            raise ModelFileError(
                f"There is no model file {printable(str(path))}.",
                "Was it moved or deleted? Put it back, or choose another model.",
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.fail(f"cannot be read: {reason}.", "Check that it is a file, and that you may read it.")
        self.size = len(self.mapped)
        self.buffer = mmap.mmap(-1, min(self.size, _MAX_HEAD_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

        self._check_magic()
        tensor_count, key_count = self._scalar("<Q"), self._scalar("<Q")
        self._check_count(key_count, 8 + 4 + 1, "metadata entries", _MAX_ENTRIES)
        self._check_count(tensor_count, 8 + 4 + 4 + 8, "tensors", _MAX_ENTRIES)
        self._arrays, self._n_strings = 0, 0  # read so far: arrays in arrays, and strings in arrays
        self.metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                self.fail(f'has the metadata key "{printable(key)}" twice.', _DOWNLOAD_AGAIN)
            self.metadata[key] = self._value(self._scalar("<I"), key)
        self.tensors = self._tensors(tensor_count)

    def fail(self, problem: str, hint: str) -> NoReturn:
        hint = _JOIN if _CUT_NAME.fullmatch(self.path.name) else hint
        raise ModelFileError(f"{printable(self.path.name) or printable(str(self.path))} {problem}", hint)

    def _read_to(self, end: int) -> None:
        """Reads up to byte `end` of the file, at least. Fails beyond the file, or if that is too much."""
        if end > self.n_read:
            if end > self.size:
                self._fail_truncated()
            if end > len(self.buffer):
                raise damaged(self.path, f"its metadata has more than {_MAX_HEAD_BYTES >> 20} MiB")
            end = min(len(self.buffer), max(end, self.n_read + _PIECE_BYTES))
            with memoryview(self.buffer) as whole, whole[self.n_read : end] as piece:
                self.mapped.read_into(self.n_read, piece)
            self.n_read = end

    def _check_magic(self) -> None:
        self._read_to(min(self.size, 4096))
        if self.buffer[:4] != b"GGUF":
            kind = guess_kind(self.buffer[:4096], self.size)
            self.fail(
                f"is {kind}, not a GGUF model." if kind else "is not a GGUF model.",
                "Look for a file of this model whose name ends in .gguf.",
            )
        self.pos = 4
        version = self._scalar("<I")
        if version and not version & 0xFFFF:
            self.fail(
                "is a big-endian GGUF model; orin-chat runs only little-endian ones.",
                "Get the little-endian file of this model, or convert it with gguf_convert_endian.py.",
            )
        if version not in (2, 3):
            self.fail(
                f"has GGUF version {version}; orin-chat reads versions 2 and 3.",
                "Get a newer copy of the model." if version < 2 else "Update orin-chat.",
            )

    def _check_count(self, count: int, min_bytes: int, items: str, most: int | None = None) -> None:
        """Fails if the rest of the file cannot hold `count` items of at least `min_bytes` each, or if these are more
        than `most`, which would take long to read."""
        if count * min_bytes > self.size - self.pos:
            self.fail(
                f"is truncated or damaged: it promises {count} {items}, more than it can hold.",
                _NOT_WHOLE,
            )
        if most is not None and count > most:
            raise damaged(self.path, f"it has {count:,} {items}; orin-chat reads at most {most:,}")

    def _fail_truncated(self) -> NoReturn:
        self.fail(
            f"is truncated or damaged: its header does not end within its {self.size} bytes.", _NOT_WHOLE
        )

    def _array(self, dtype: str, count: int) -> NDArray[np.generic]:
        kind = np.dtype(dtype)
        self._check_count(count, kind.itemsize, "array elements")
        start, self.pos = self.pos, self.pos + count * kind.itemsize
        self._read_to(self.pos)
        found = np.frombuffer(self.buffer, kind, count, start)
        found.flags.writeable = False
        return found

    def _scalar(self, kind: str) -> int:
        """One number. Counts and ids are int; a kind of float gives a float, which the return type does not show."""
        start, self.pos = self.pos, self.pos + struct.calcsize(kind)
        self._read_to(self.pos)
        value: int = struct.unpack_from(kind, self.buffer, start)[0]
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self.pos += length
        self._read_to(self.pos)
        return self.buffer[self.pos - length : self.pos].decode("utf-8", "replace")

    def _strings(self, count: int) -> StringArray:
        self._check_count(count, 8, "strings")
        self._n_strings += count
        self._check_count(self._n_strings, 0, "strings in lists", _MAX_STRINGS)
        offsets = array("q", [self.pos])
        while len(offsets) <= count:
            self._read_to(offsets[-1] + 8)
            try:
                follow(np.frombuffer(self.buffer, np.uint8, self.n_read), offsets, count)
            except OverflowError:
                self._fail_truncated()
        self.pos = offsets[-1]
        self._read_to(self.pos)
        return StringArray(self.buffer, offsets)

    def _value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _BOOL:
            return self._scalar("<B") != 0
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise damaged(
                self.path, f'the metadata key "{printable(key)}" has a value of unknown kind {kind}'
            )
        element, count = self._scalar("<I"), self._scalar("<Q")
        if element in _SCALARS:
            return self._array(_SCALARS[element], count)
        if element == _BOOL:
            return self._array("<B", count) != 0
        if element == _STRING:
            return self._strings(count)
        self._check_count(count, 4 + 8, "arrays")
        self._arrays += count
        self._check_count(self._arrays, 0, "arrays in arrays", _MAX_ENTRIES)
        return [self._value(element, key, depth + 1) for _ in range(count)]

    def _tensors(self, count: int) -> list[TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise damaged(self.path, "its general.alignment is not a power of two")
        headers = []
        for _ in range(count):
            name, dimensions = self._string(), self._scalar("<I")
            if dimensions > _MAX_DIMENSIONS:
                raise damaged(self.path, f'the tensor "{printable(name)}" has {dimensions} dimensions')
            sizes = [self._scalar("<Q") for _ in range(dimensions)]
            headers.append((name, sizes, self._scalar("<I"), self._scalar("<Q")))

        base = self.pos + -self.pos % alignment
        tensors = []
        for name, sizes, kind, offset in headers:
            tensor = f'tensor "{printable(name)}"'
            if kind not in GGML_TYPES or kind in REMOVED:
                only = "It may be made for ik_llama.cpp alone. " if kind >= FORK else ""
                self.fail(
                    f"stores the {tensor} in a type (number {kind}) that orin-chat does not know.",
                    f"{only}Choose another quantization of this model, such as Q8_0 or Q4_K_M.",
                )
            type_name, block, block_bytes = GGML_TYPES[kind]
            elements = math.prod(sizes)
            if not elements or (sizes[0] if sizes else 1) % block or offset % alignment:
                raise damaged(
                    self.path,
                    f"the {tensor} cannot have the shape {tuple(reversed(sizes))} as {type_name} at {offset}",
                )
            n_bytes = elements // block * block_bytes
            start = base + offset
            end = start + n_bytes + 4 * (kind == I2_S)
            if end > self.size:
                self.fail(
                    f"is truncated: it has {self.size} bytes, but the {tensor} goes on to {end}.",
                    _NOT_WHOLE,
                )
            shape = tuple(reversed(sizes)) or (1,)  # a number, which llama.cpp reads so, too
            tensors.append(TensorInfo(name, shape, kind, n_bytes, self.mapped, start))
            if kind == I2_S:  # its scale, under the name that scales have in other files
                scale = f"{name.removesuffix('.weight')}.scale"
                tensors.append(TensorInfo(scale, (1,), 0, 4, self.mapped, start + n_bytes))
        return tensors
