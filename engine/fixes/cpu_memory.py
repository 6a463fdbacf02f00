"""tinygrad 0.14.0 on a CPU: large buffers lie in huge pages.

The allocator maps shared memory, which Linux keeps in pages of 4 KiB: a walk through a gigabyte of weights then
looks up a quarter of a million of them, and each is cleared by a fault of its own. Private memory may be given
pages of 2 MiB on request, and nothing here shares it with other processes.
"""

from __future__ import annotations

import mmap
from typing import Any

from tinygrad.device import BufferSpec
from tinygrad.helpers import mv_address
from tinygrad.runtime.ops_cpu import CPUAllocator
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

from engine.fixes import require_tinygrad

_HUGE = 2 << 20

_stock_alloc = CPUAllocator._alloc


def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError where another version is installed."""
    require_tinygrad("Huge pages on the CPU")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        CPUAllocator._alloc = _alloc


def _alloc(self: Any, size: int, options: BufferSpec) -> HCQBuffer:
    if size < _HUGE or options.external_ptr is not None:
        return _stock_alloc(self, size, options)
    memory = mmap.mmap(-1, size + _HUGE, mmap.MAP_ANON | mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = mv_address(memory)
    address += -address % _HUGE
    return HCQBuffer(address, size, meta=memory, view=MMIOInterface(address, size, fmt="B"), owner=self.dev)
