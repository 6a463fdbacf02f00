"""tinygrad 0.14.0 on NV: no buffer ever lies in a window of the GPU's addresses.

A GPU sees its shared and its local memory through windows in the address space of global memory, 4 GiB each: an
access that falls into one goes there, whatever is mapped. On NVIDIA's desktop driver tinygrad puts them at
0x7293_0000_0000 and 0x7294_0000_0000 and has nothing that keeps buffers away. Two kinds can meet them: buffers on
the device, whose addresses tinygrad counts up from 128 GiB to beyond the windows; and memory of the CPU, which the GPU
maps at the address it has there, and which Linux puts anywhere between 0x7000_0000_0000 and 0x7fff_ffff_ffff (where
mmap_rnd_bits is 32, as on Ubuntu 24.04).

With this fix the range for buffers ends where the windows begin; and the windows are reserved in this process, so
that Linux puts nothing there. What has been put there before is refused when the GPU is to map it. (On a Jetson the
windows lie elsewhere, and engine/tegra keeps them free.)
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
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000  # of Linux' mman-common.h, on x86-64 and arm64
_stock_alloc = NVKIface.alloc


@once("Addresses of NV's buffers")
def apply() -> None:
    """Changes tinygrad in this process."""
    base = NVKIface.uvm_vaddr_allocator.base
    NVKIface.uvm_vaddr_allocator = BumpAllocator(WINDOWS.start - base, base=base, wrap=False)
    NVKIface.alloc = _alloc
    reserve(WINDOWS)


def _alloc(self: NVKIface, size: int, *args: Any, cpu_addr: int | None = None, **options: Any) -> Any:
    if cpu_addr is not None and meets(cpu_addr, size):
        raise BackendError(
            "Memory of this process lies where the GPU has the windows of its shared and local memory.",
            "This is chance, and rare: start again.",
        )
    return _stock_alloc(self, size, *args, cpu_addr=cpu_addr, **options)


def meets(address: int, size: int) -> bool:
    """Whether a range of addresses and the windows have any in common."""
    return address < WINDOWS.stop and address + size > WINDOWS.start


def reserve(addresses: range) -> bool:
    """Keeps Linux from putting anything at these addresses, without using memory. Returns whether all of them
    were free, and exist on this machine."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    none = 0  # PROT_NONE
    return bool(libc.mmap(addresses.start, len(addresses), none, flags, -1, 0) == addresses.start)
