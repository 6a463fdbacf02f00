"""tinygrad 0.14.0 on NV: no buffer overlaps the GPU's windows for shared and local memory.

A GPU maps its shared and its local memory into two windows of the global address space, 4 GiB each. An access to an
address in a window goes to that memory, whatever else is mapped there. On NVIDIA's desktop driver tinygrad puts the
windows at 0x7293_0000_0000 and 0x7294_0000_0000 and does not keep buffers away from them. Two kinds of buffers can
overlap them: device buffers, whose addresses tinygrad counts up from 128 GiB past the windows; and CPU memory, which
the GPU maps at its CPU address. Linux puts CPU memory anywhere between 0x7000_0000_0000 and 0x7fff_ffff_ffff if
mmap_rnd_bits is 32, as on Ubuntu 24.04.

With this fix the address range for device buffers ends where the windows begin, and this process reserves the windows'
addresses, so that Linux puts nothing there. Memory that was there earlier is refused when the GPU is to map it. (On a
Jetson the windows are elsewhere, and engine/tegra keeps them free.)
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

from tinygrad.runtime.ops_nv import NVKIface
from tinygrad.runtime.support.memory import BumpAllocator

from engine.errors import BackendError
from engine.fixes import once

WINDOWS = range(0x7293_0000_0000, 0x7295_0000_0000)
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000  # Linux' mman-common.h, on x86-64 and arm64
_PROT_NONE = 0
_stock_alloc = NVKIface.alloc


@once("Addresses of NV's buffers")
def apply() -> None:
    """Changes tinygrad in this process."""
    base = NVKIface.uvm_vaddr_allocator.base
    NVKIface.uvm_vaddr_allocator = BumpAllocator(WINDOWS.start - base, base=base, wrap=False)
    NVKIface.alloc = _alloc
    reserve(WINDOWS)


def _alloc(self: NVKIface, size: int, *args: Any, cpu_addr: int | None = None, **options: Any) -> Any:
    if cpu_addr is not None and overlaps_windows(cpu_addr, size):
        raise BackendError(
            "Memory of this process lies where the GPU has the windows of its shared and local memory.",
            "This is chance, and rare: start again.",
        )
    return _stock_alloc(self, size, *args, cpu_addr=cpu_addr, **options)


def overlaps_windows(address: int, size: int) -> bool:
    """Whether the `size` bytes at `address` overlap the windows."""
    return address < WINDOWS.stop and address + size > WINDOWS.start


def reserve(addresses: range) -> bool:
    """Reserves addresses in this process without using memory, so that Linux puts nothing there. Returns whether all of
    them exist on this machine and were free."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    return bool(libc.mmap(addresses.start, len(addresses), _PROT_NONE, flags, -1, 0) == addresses.start)
