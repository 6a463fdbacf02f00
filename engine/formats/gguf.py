"""GGUF model files, read by memory map: little-endian versions 2 and 3, single or split.

Nothing in the file is trusted: each count is held against the bytes that are there before anything is made
from it. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar, overload

import numpy as np

from engine.errors import ModelFileError

# ggml type id -> (name, elements in a block, bytes of a block); ids 31-33 and 36-38 are old repacked forms
GGML_BLOCK: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    31: ("Q4_0_4_4", 32, 18),
    32: ("Q4_0_4_8", 32, 18),
    33: ("Q4_0_8_8", 32, 18),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    36: ("IQ4_NL_4_4", 32, 18),
    37: ("IQ4_NL_4_8", 32, 18),
    38: ("IQ4_NL_8_8", 32, 18),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# metadata value type id -> numpy dtype; the other three are below
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

_MAX_DIMENSIONS = 4  # of a tensor, as in ggml
_MAX_NESTING = 4  # of arrays in arrays
_MAX_STRINGS = 1 << 22  # in one array: eight times the largest list of merges known
_DOWNLOAD_AGAIN = "Download it again."
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_T = TypeVar("_T")
_D = TypeVar("_D")
_REQUIRED = object()


class StringArray(Sequence[str]):
    """Strings as they lie in the file, decoded when asked for. Bytes that are not UTF-8 become U+FFFD in the
    text; `raw` and `raws` give them as they are."""

    def __init__(self, buffer: mmap.mmap, ends: array[int]) -> None:
        self._buffer = buffer
        self._ends = ends  # string i is its eight-byte length at ends[i], then the text up to ends[i + 1]

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return (raw.decode("utf-8", "replace") for raw in self.raws())

    def raw(self, index: int) -> bytes:
        """The bytes of one string."""
        i = range(len(self))[index]
        return self._buffer[self._ends[i] + 8 : self._ends[i + 1]]

    def raws(self) -> list[bytes]:
        """The bytes of all strings: about 0.1 µs each."""
        if not len(self):
            return []
        first = self._ends[0]
        block = self._buffer[first : self._ends[-1]]
        cuts = [end - first for end in self._ends]
        return [block[start + 8 : end] for start, end in pairwise(cuts)]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` has rows first (the file's order reversed), `type` is ggml's id (`GGML_BLOCK`), and
    `data` shows its `n_bytes` bytes in the file: uint8, one dimension, read-only, nothing copied."""

    name: str
    shape: tuple[int, ...]
    type: int
    n_bytes: int
    data: np.ndarray[tuple[int], np.dtype[np.uint8]]

    @property
    def type_name(self) -> str:
        return GGML_BLOCK[self.type][0]

    def release(self) -> None:
        """Takes its pages out of this process's memory. They are read again when they are needed again."""
        buffer = self.data.base
        while isinstance(buffer, np.ndarray):
            buffer = buffer.base
        buffer = buffer.obj if isinstance(buffer, memoryview) else buffer
        if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = self.data.ctypes.data - np.frombuffer(buffer, np.uint8).ctypes.data
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            buffer.madvise(mmap.MADV_DONTNEED, page, start + self.n_bytes - page)

    def __repr__(self) -> str:
        return f"<{self.name!r} {self.type_name} {self.shape}>"


class GGUF:
    """An open model file. Of a split file (`…-00001-of-00003.gguf`) any part opens all of them, and the
    metadata are the first part's.

    Numbers, booleans and strings in `metadata` are Python's own; arrays are numpy arrays that view the file,
    `StringArray`, or lists of arrays. `file_bytes` counts all parts. Raises ModelFileError for whatever is
    wrong with the file.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.paths = _parts(self.path)
        readers = [_Reader(part) for part in self.paths]
        self.metadata = readers[0].metadata
        self.file_bytes = sum(reader.size for reader in readers)
        if len(readers) == 1 and self.get("split.count", int, 1) > 1:
            readers[0].fail(
                f"is one part of {self.get('split.count', int)}, and its name does not say which.",
                "Give all parts the names they were published with, such as name-00001-of-00003.gguf.",
            )
        tensors: dict[str, TensorInfo] = {}
        for number, reader in enumerate(readers):
            split = (reader.metadata.get("split.no"), reader.metadata.get("split.count"))
            if len(readers) > 1 and split != (number, len(readers)):
                reader.fail("is not the part of a split model that its name says.", _DOWNLOAD_AGAIN)
            for tensor in reader.tensors:
                if tensor.name in tensors:
                    reader.fail(f'has a second tensor named "{shown(tensor.name)}".', _DOWNLOAD_AGAIN)
                tensors[tensor.name] = tensor
        promised = self.get("split.tensors.count", int, len(tensors)) if len(readers) > 1 else len(tensors)
        if promised != len(tensors):
            readers[0].fail(f"promises {promised} tensors; its parts have {len(tensors)}.", _DOWNLOAD_AGAIN)
        self.tensors = tensors

    @overload
    def get(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: _D) -> _T | _D: ...
    def get(self, key: str, kind: type[_T], default: object = _REQUIRED) -> object:
        """The metadata value of `key`, or `default` where the file has none. Whole numbers do for a `float`.

        Raises ModelFileError, naming the key, if the value is missing and has no default, or if it is no
        `kind`: int, float, bool, str, np.ndarray, StringArray.
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
            f'{shown(self.path.name)} is no complete model: its metadata key "{shown(key)}" {wrong}.',
            "Get another copy of the model, or convert it again.",
        )

    def close(self) -> None:
        """Lets go of the file. Arrays taken from it before stay valid and hold the map until they go."""
        self.metadata, self.tensors = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shown(text: str) -> str:
    """Text from a file, made fit for a message: one line of bounded length, no control characters."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:200])
    return text if len(text) <= 80 else f"{text[:79]}…"


def _parts(path: Path) -> list[Path]:
    """The files that make up the model of which `path` is one. A name alone does not make a split file."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match or int(match["count"]) < 2 or "split.count" not in _Reader(path).metadata:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1)]
    for missing in (part for part in parts if not part.exists()):
        raise ModelFileError(
            f"{shown(path.name)} is one of {count} parts, and {shown(missing.name)} is not beside it.",
            "Download all parts into one folder.",
        )
    return parts


class _Reader:
    """One file, read from front to back on construction: `metadata`, `tensors`, `size` in bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.pos = path, 0
        try:
            if path.is_dir():
                self.fail("is a folder, not a model file.", "Give the path of a .gguf file.")
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if not self.size:
                    self.fail("is empty.", _DOWNLOAD_AGAIN)
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(
                f"There is no model file {shown(str(path))}.",
                "Was it moved or deleted? Put it back, or choose another model.",
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.fail(f"cannot be read: {reason}.", "Check that it is a file that you may read.")
        self.size = len(self.buffer)

        self._check_magic()
        tensor_count, key_count = self._scalar("<u8"), self._scalar("<u8")
        self._check_room(key_count, 8 + 4 + 1, "metadata entries")
        self._check_room(tensor_count, 8 + 4 + 4 + 8, "tensors")
        self.metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                self.fail(f'has the metadata key "{shown(key)}" twice.', _DOWNLOAD_AGAIN)
            self.metadata[key] = self._value(self._scalar("<u4"), key)
        self.tensors = self._tensors(tensor_count)

    def fail(self, what: str, hint: str) -> NoReturn:
        raise ModelFileError(f"{shown(self.path.name) or shown(str(self.path))} {what}", hint)

    def _check_magic(self) -> None:
        if self.size < 4 or self.buffer[:4] != b"GGUF":
            looks_like = _looks_like(self.buffer[:4096], self.size)
            self.fail(
                f"is {looks_like}, not a GGUF model." if looks_like else "is not a GGUF model.",
                "Look for a file of this model whose name ends in .gguf.",
            )
        self.pos = 4
        version = self._scalar("<u4")
        if version and not version & 0xFFFF:
            self.fail(
                "is a big-endian GGUF model; only little-endian ones can be run here.",
                "Get the ordinary file of this model, or convert it with gguf_convert_endian.py.",
            )
        if version not in (2, 3):
            self.fail(
                f"has GGUF version {version}; versions 2 and 3 can be read.",
                "Get a newer copy of the model." if version < 2 else "Update orin-chat.",
            )

    def _check_room(self, count: int, least_bytes: int, what: str) -> None:
        """Refuses `count` things of at least `least_bytes` each if the rest of the file cannot hold them."""
        if count * least_bytes > self.size - self.pos:
            self.fail(
                f"is truncated or damaged: it promises {count} {what}, more than it has room for.",
                _DOWNLOAD_AGAIN,
            )

    def _truncated(self) -> NoReturn:
        self.fail(f"is truncated or damaged: its header does not end within its {self.size} bytes.",
                  _DOWNLOAD_AGAIN)  # fmt: skip

    def _array(self, dtype: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        kind = np.dtype(dtype)
        self._check_room(count, kind.itemsize, "array elements")
        start = self.pos
        self.pos += count * kind.itemsize
        return np.frombuffer(self.buffer, kind, count, start)

    def _scalar(self, dtype: str) -> int:
        """One number; typed int since counts and ids are, though a float comes back for a float dtype."""
        kind = np.dtype(dtype)
        if self.pos + kind.itemsize > self.size:
            self._truncated()
        self.pos += kind.itemsize
        value: int = np.frombuffer(self.buffer, kind, 1, self.pos - kind.itemsize)[0].item()
        return value

    def _string(self) -> str:
        length = self._scalar("<u8")
        if length > self.size - self.pos:
            self._truncated()
        self.pos += length
        return self.buffer[self.pos - length : self.pos].decode("utf-8", "replace")

    def _strings(self, count: int) -> StringArray:
        if count > _MAX_STRINGS:
            self.fail(f"is damaged: it has a list of {count} strings.", _DOWNLOAD_AGAIN)
        self._check_room(count, 8, "strings")
        length_at = struct.Struct("<Q").unpack_from
        buffer, pos = self.buffer, self.pos
        ends = array("q", [pos])
        add = ends.append
        try:  # the one loop over a vocabulary: lengths only, no text is touched
            for _ in range(count):
                pos += 8 + length_at(buffer, pos)[0]
                add(pos)
        except (struct.error, OverflowError):
            self._truncated()
        if pos > self.size:
            self._truncated()
        self.pos = pos
        return StringArray(buffer, ends)

    def _value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _BOOL:
            return self._scalar("<u1") != 0
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_NESTING:
            self.fail(
                f'is damaged: the metadata key "{shown(key)}" has a value of unknown kind {kind}.',
                _DOWNLOAD_AGAIN,
            )
        element, count = self._scalar("<u4"), self._scalar("<u8")
        if element in _SCALARS:
            return self._array(_SCALARS[element], count)
        if element == _BOOL:
            return self._array("<u1", count) != 0
        if element == _STRING:
            return self._strings(count)
        self._check_room(count, 4 + 8, "arrays")
        return [self._value(element, key, depth + 1) for _ in range(count)]

    def _tensors(self, count: int) -> list[TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail("is damaged: its general.alignment is no power of two.", _DOWNLOAD_AGAIN)
        headers = []
        for _ in range(count):
            name, dimensions = self._string(), self._scalar("<u4")
            if dimensions > _MAX_DIMENSIONS:
                self.fail(
                    f'is damaged: the tensor "{shown(name)}" has {dimensions} dimensions.', _DOWNLOAD_AGAIN
                )
            sizes = [self._scalar("<u8") for _ in range(dimensions)]
            headers.append((name, sizes, self._scalar("<u4"), self._scalar("<u8")))

        base = self.pos + -self.pos % alignment
        data = np.frombuffer(self.buffer, np.uint8)
        tensors = []
        for name, sizes, kind, offset in headers:
            tensor = f'tensor "{shown(name)}"'
            if kind not in GGML_BLOCK:
                self.fail(f"stores the {tensor} in a type (number {kind}) that orin-chat does not know.",
                          "Choose another quantization of this model, such as Q8_0 or Q4_K_M.")  # fmt: skip
            type_name, block_elements, block_bytes = GGML_BLOCK[kind]
            elements = int(np.prod(sizes, dtype=object)) if sizes else 1
            if not elements or (sizes[0] if sizes else 1) % block_elements or offset % alignment:
                self.fail(
                    f"is damaged: the {tensor} cannot have the shape {tuple(reversed(sizes))} "
                    f"as {type_name} at {offset}.",
                    _DOWNLOAD_AGAIN,
                )
            n_bytes = elements // block_elements * block_bytes
            start = base + offset
            if start + n_bytes > self.size:
                self.fail(
                    f"is truncated: it has {self.size} bytes, but the {tensor} goes on to {start + n_bytes}.",
                    _DOWNLOAD_AGAIN,
                )
            shape = tuple(reversed(sizes))
            tensors.append(TensorInfo(name, shape, kind, n_bytes, data[start : start + n_bytes]))
        return tensors


def _looks_like(head: bytes, size: int) -> str:
    """What a file that is no GGUF seems to be, from its first bytes; "" if that is not known."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (the model itself was not downloaded)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
        return "a safetensors file"
    if head.startswith(b"PK"):
        return "a zip archive or a PyTorch checkpoint"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"(\xb5/\xfd")):
        return "a compressed archive"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a model in a format older than GGUF"
    if text.startswith((b"{", b"[")):
        return "a JSON file"
    if head.count(0) == len(head):
        return "a file of zeros (an unfinished download?)"
    return ""
