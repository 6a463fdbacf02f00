"""Arrays that kernels and numpy share. They begin as zeros, and large ones are in huge pages.

tinygrad's allocator uses pages of 4 KiB, and reading a gigabyte of weights would translate a quarter of a million of
them. Pages that are never touched use no memory.
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
    """A zeroed tensor (n,) on the CPU. `sparse`: much of it may never be used, so it has no huge pages, which would
    hold unused elements beside used ones."""
    size = max(1, n * dtype.itemsize)
    huge = size >= _HUGE and not sparse
    align = _HUGE if huge else mmap.PAGESIZE
    # Shared mappings get no huge pages.
    pages = mmap.mmap(-1, size + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
    """Adds to the memory that tinygrad reports as in use."""
    GlobalCounters.mem_used += n_bytes
    GlobalCounters.mem_used_per_device["CPU"] += n_bytes


def array(values: NDArray[Any], dtype: DType) -> Tensor:
    """A tensor (n,) with the values of an array of any shape, in memory of `zeros`."""
    tensor = zeros(values.size, dtype)
    view(tensor)[:] = values.reshape(-1)
    return tensor


def mapped(values: NDArray[Any], dtype: DType) -> Tensor:
    """A tensor (n,) in the memory of an array of bytes, such as that of a mapped file. It does not count as in use."""
    n = values.nbytes // dtype.itemsize
    tensor = Tensor.from_blob(values.ctypes.data, (n,), dtype=dtype, device="CPU")
    _memory[tensor.uop.base.buffer] = values.reshape(-1)
    return tensor


def view(tensor: Tensor) -> NDArray[Any]:
    """The memory of such a tensor, as an array (n,); bfloat16 appears as uint16."""
    return _memory[tensor.uop.base.buffer].view(np.dtype(tensor.dtype.fmt or "H"))


def address(tensor: Tensor) -> int:
    """The address of such a tensor."""
    return int(_memory[tensor.uop.base.buffer].ctypes.data)
