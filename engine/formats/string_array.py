"""The strings of a list in a GGUF file, as those of a vocabulary: found at once, and decoded when they are read."""

from __future__ import annotations

import mmap
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 16  # strings that are followed one by one before others are looked for


class StringArray(Sequence[str]):
    """An array of strings of the file, decoded when they are read. Bytes that are not UTF-8 become U+FFFD; `raw` and
    `raws` return the bytes as they are."""

    def __init__(self, buffer: mmap.mmap | bytes, offsets: array[int]) -> None:
        """String i lies from `offsets[i]` to `offsets[i + 1]`: its length in eight bytes, then its text."""
        self._buffer, self._offsets = buffer, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

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
        return self._buffer[self._offsets[i] + 8 : self._offsets[i + 1]]

    def head(self, n: int | None) -> StringArray:
        """The first n strings, or all, in memory of their own."""
        offsets = np.frombuffer(self._offsets, np.int64)[: None if n is None else n + 1]
        block = self._buffer[int(offsets[0]) : int(offsets[-1])]
        return StringArray(block, array("q", (offsets - offsets[0]).tobytes()))

    def beginning_with(self, first: bytes) -> list[int]:
        """The indices of the strings that begin with one of these bytes."""
        starts = np.frombuffer(self._offsets, np.int64)
        full = np.flatnonzero(np.diff(starts) > 8)
        if not len(full):
            return []
        begins = np.frombuffer(self._buffer, np.uint8)[starts[full] + 8]
        found: list[int] = full[np.isin(begins, np.frombuffer(first, np.uint8))].tolist()
        return found

    def has(self, text: str) -> bool:
        """Whether a string of the array is `text`. Faster than to read them all."""
        raw = text.encode()
        wanted, at = len(raw).to_bytes(8, "little") + raw, self._offsets[0]
        while (at := self._buffer.find(wanted, at, self._offsets[-1])) >= 0:
            if self._offsets[bisect_left(self._offsets, at)] == at:
                return True
            at += 1
        return False

    def raws(self) -> list[bytes]:
        """The bytes of all strings, which takes about 0.1 µs a string."""
        first = self._offsets[0]
        block = self._buffer[first : self._offsets[-1]]
        return [block[start - first + 8 : end - first] for start, end in pairwise(self._offsets)]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


def follow(known: NDArray[np.uint8], offsets: array[int], count: int) -> None:
    """Adds the ends of consecutive strings to `offsets`, whose last number is where the first of these begins, until
    there are `count` or the next length is not in `known`: one at least. Raises OverflowError.

    Lengths below 256 are found all at once, as seven zeros after a byte: if each such place is where the string of the
    one before ends, all of them are lengths. This takes a tenth of the time of a loop over a vocabulary."""
    length_at, numbers = struct.Struct("<Q").unpack_from, known.data
    zeros = known[offsets[-1] + 1 :] == 0
    for n in (1, 2, 3):  # 2, 4 and 7 zeros
        zeros = zeros[:-n] & zeros[n:]
    starts = np.flatnonzero(zeros) + offsets[-1]
    ends = starts + 8 + known[starts]
    lasts = np.append(np.flatnonzero(ends[:-1] != starts[1:]), len(ends) - 1)  # of runs
    while len(offsets) <= count:
        first = int(starts.searchsorted(offsets[-1]))
        if first < len(starts) and starts[first] == offsets[-1]:
            last = int(lasts[lasts.searchsorted(first)])
            offsets.frombytes(ends[first : min(last, first + count - len(offsets)) + 1].tobytes())
        for _ in range(min(_AT_ONCE, count + 1 - len(offsets))):  # long and empty ones
            start = offsets[-1]
            if start + 8 > len(known):
                return
            offsets.append(start + 8 + length_at(numbers, start)[0])
