"""Copies parts of files to buffers of the device, one after the other, and reads ahead.

On CUDA several threads read into pinned memory, from which the device fetches parts while they read the next ones.
Nothing waits for the device: a copy is in line with the kernels that are launched before and after it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tinygrad import Device, dtypes
from tinygrad.device import Buffer

_SLOT_BYTES = 16 << 20
_SLOTS = 6
_READERS = 6
_SWITCH_S = 5e-5  # readers need Python's lock for moments, and would wait 5 ms for it while a thread computes


@dataclass(frozen=True)
class Part:
    """Bytes of a file. `read` fills memory with those from an offset in the part on; any thread may call it."""

    n_bytes: int
    read: Callable[[int, memoryview], None]


class Upload:
    """The next of some parts is copied by each call of `next`."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = iter(parts)

    def next(self, buffer: Buffer) -> None:
        """Copies the next part to an allocated buffer of its size, after all kernels that were launched before. Raises
        what `read` raises."""
        part = next(self._parts)
        host = memoryview(bytearray(part.n_bytes))
        part.read(0, host)
        buffer.copy_from(Buffer("PYTHON", part.n_bytes, dtypes.uint8, opaque=host))
        Device[Device.DEFAULT].synchronize()  # lets go of the host's memory

    def close(self) -> None:
        """Frees its memory, once the device is done with it."""


class PinnedUpload(Upload):
    """`Upload` on CUDA. It may run in a thread of its own, beside others that use the device."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__(parts)
        from tinygrad.runtime.autogen import cuda
        from tinygrad.runtime.ops_cuda import check

        self._cuda, self._check, self._context = cuda, check, Device[Device.DEFAULT].context
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._use_device()
        self._threads = ThreadPoolExecutor(_READERS, "weights", self._use_device)
        self._ahead: deque[tuple[int, _Slot, Future[None]]] = deque()  # what is read, in order
        self._cuts = self._cut()
        self._slots = [_Slot(cuda, check) for _ in range(_SLOTS)]
        for slot in self._slots:
            self._read_next(slot)

    def next(self, buffer: Buffer) -> None:
        done = 0
        while done < buffer.nbytes:
            n, slot, reading = self._ahead.popleft()
            reading.result()
            target = self._cuda.CUdeviceptr_v2(buffer._buf.value + done)
            self._check(self._cuda.cuMemcpyHtoDAsync_v2(target, slot.address, n, None))
            self._check(self._cuda.cuEventRecord(slot.copied, None))
            self._read_next(slot)
            done += n

    def close(self) -> None:
        sys.setswitchinterval(self._switch_s)
        self._threads.shutdown(cancel_futures=True)
        self._check(self._cuda.cuCtxSynchronize())
        for slot in self._slots:
            slot.free()

    def _use_device(self) -> None:
        """Makes CUDA's calls of this thread be for the device."""
        self._check(self._cuda.cuCtxSetCurrent(self._context))

    def _cut(self) -> Iterator[tuple[Part, int, int]]:
        """The parts in pieces that fit a slot: part, offset, bytes."""
        for part in self._parts:
            for start in range(0, part.n_bytes, _SLOT_BYTES):
                yield part, start, min(_SLOT_BYTES, part.n_bytes - start)

    def _read_next(self, slot: _Slot) -> None:
        if cut := next(self._cuts, None):
            part, start, n = cut
            self._ahead.append((n, slot, self._threads.submit(slot.read, part, start, n)))


class _Slot:
    """Pinned memory, and the event after which the device has fetched what was in it."""

    def __init__(self, cuda: Any, check: Callable[[int], None]) -> None:
        self._cuda, self._check = cuda, check
        self.address, self.copied = ctypes.c_void_p(), cuda.CUevent()
        check(cuda.cuEventCreate(ctypes.byref(self.copied), cuda.CU_EVENT_DISABLE_TIMING))

    @functools.cached_property
    def _memory(self) -> memoryview:
        """Allocated by the first reader of it: that takes 8 ms (H200), in which others read already."""
        self._check(self._cuda.cuMemHostAlloc(ctypes.byref(self.address), _SLOT_BYTES, 0))
        assert self.address.value
        return memoryview((ctypes.c_uint8 * _SLOT_BYTES).from_address(self.address.value)).cast("B")

    def read(self, part: Part, start: int, n: int) -> None:
        """Fills it with `n` bytes of a part, once the device has fetched the last ones."""
        self._check(self._cuda.cuEventSynchronize(self.copied))
        part.read(start, self._memory[:n])

    def free(self) -> None:
        self._check(self._cuda.cuEventDestroy_v2(self.copied))
        if self.address.value:
            self._check(self._cuda.cuMemFreeHost(self.address))


def upload(parts: Iterable[Part]) -> Upload:
    """An `Upload` for the default device."""
    return PinnedUpload(parts) if Device.DEFAULT.split(":")[0] == "CUDA" else Upload(parts)
