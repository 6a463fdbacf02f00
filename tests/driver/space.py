"""A GPU's address space in the simulator: which page lies where in this process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from tests.driver.buddy import PAGE, Buddy

REACH = 1 << 40
KERNEL_BYTES = 4 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NORESERVE = 0x4000


def map_pages(fd: int, size: int, *, at: int = 0, executable: bool = False) -> int:
    """All of a file, shared; or, for -1, memory that costs nothing until it is touched."""
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    protection = mmap.PROT_READ | mmap.PROT_WRITE | (mmap.PROT_EXEC if executable else 0)
    address = _libc.mmap(at, size, protection, kind, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return address


def unmap_pages(address: int, size: int) -> None:
    assert _libc.munmap(address, size) == 0


class Unmapped(Exception):
    """The GPU touched an address that nothing is mapped to."""

    def __init__(self, address: int):
        super().__init__(f"{address:#x}")
        self.address = address


class Space:
    """Two allocators, the buffers' and nvgpu's own, and a table of pages up to 2^40 that kernels read too."""

    def __init__(self, start: int, end: int):
        self.user = Buddy(start, end)
        self.kernel = Buddy(end, end + KERNEL_BYTES)
        self.mapped: dict[int, tuple[int, int]] = {}  # GPU address: address here, bytes
        self.reserved: dict[int, int] = {}
        self.fds: dict[int, int] = {}  # GPU address: the buffer's inode
        self.table = map_pages(-1, REACH // PAGE * 8)

    def map(self, fd: int, size: int, inode: int) -> int:
        va = self.user.alloc(size)
        here = map_pages(fd, size)
        self.mapped[va], self.fds[va] = (here, size), inode
        self._set(va, size, here)
        return va

    def unmap(self, va: int) -> None:
        here, size = self.mapped.pop(va)
        del self.fds[va]
        self._set(va, size, None)
        unmap_pages(here, size)
        self.user.free(va)

    def at(self, va: int, size: int) -> int:
        """The address here of `size` bytes."""
        for page in range(va // PAGE, (va + size - 1) // PAGE + 1):
            if page >= REACH // PAGE or not self._entry(page):
                raise Unmapped(max(va, page * PAGE))
        return self._entry(va // PAGE) + va % PAGE

    def read(self, va: int, size: int) -> bytes:
        return ctypes.string_at(self.at(va, size), size)

    def write(self, va: int, data: bytes) -> None:
        ctypes.memmove(self.at(va, len(data)), data, len(data))

    def close(self) -> None:
        for va in list(self.mapped):
            self.unmap(va)
        unmap_pages(self.table, REACH // PAGE * 8)

    def _entry(self, page: int) -> int:
        return ctypes.c_uint64.from_address(self.table + page * 8).value

    def _set(self, va: int, size: int, here: int | None) -> None:
        if va + size > REACH:
            return  # beyond what kernels can address
        pages = size // PAGE
        entries = (ctypes.c_uint64 * pages).from_address(self.table + va // PAGE * 8)
        np.ctypeslib.as_array(entries)[:] = (
            0 if here is None else here + np.arange(pages, dtype=np.uint64) * PAGE
        )
