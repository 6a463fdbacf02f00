"""Arrays that kernels and numpy share, cleared, and in huge pages where they are large.

tinygrad's own allocator keeps to pages of 4 KiB: a walk through a gigabyte of weights would look up a quarter
of a million of them. Memory that is not touched yet takes no room.
"""

from __future__ import annotations

import mmap
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.helpers import GlobalCounters

_HUGE = 2 << 20
_memory: WeakKeyDictionary[Buffer, NDArray[np.uint8]] = WeakKeyDictionary()


def zeros(n: int, dtype: DType, sparse: bool = False) -> Tensor:
    """A tensor (n,) on the CPU, in memory of its own. `sparse`: much of it may never be used, and is not to take
    room because it shares a huge page with what is."""
    size = max(1, n * dtype.itemsize)
    huge = size >= _HUGE and not sparse
    align = _HUGE if huge else mmap.PAGESIZE
    pages = mmap.mmap(-1, size + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % align
    memory = whole[start : start + size]
    tensor = Tensor.from_blob(memory.ctypes.data, (n,), dtype=dtype, device="CPU")
    _memory[tensor.uop.base.buffer] = memory
    _count(size)
    finalize(tensor.uop.base.buffer, _count, -size)
    return tensor


def _count(n_bytes: int) -> None:
    """Adds to what tinygrad says it holds."""
    GlobalCounters.mem_used += n_bytes
    GlobalCounters.mem_used_per_device["CPU"] += n_bytes


def array(values: NDArray[Any], dtype: DType) -> Tensor:
    """A copy of `values` (of any shape), as `zeros` makes it."""
    tensor = zeros(values.size, dtype)
    view(tensor)[:] = values.reshape(-1)
    return tensor


def view(tensor: Tensor) -> NDArray[Any]:
    """The memory of a tensor that `zeros` or `array` made, as an array (n,); a bfloat16 is seen as its
    bits."""
    return _memory[tensor.uop.base.buffer].view(np.dtype(tensor.dtype.fmt or "H"))


def address(tensor: Tensor) -> int:
    return int(_memory[tensor.uop.base.buffer].ctypes.data)
