"""A kernel that only copies memory, to measure its bandwidth."""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.uops import finish, load, store

_THREADS = 256
_LOAD_FLOATS = 4  # 16 bytes, the widest load of a thread
_LOADS = 4  # loads that each thread has in flight
BLOCK_FLOATS = _THREADS * _LOAD_FLOATS * _LOADS
"""float32 numbers that a block copies."""


@functools.cache
def copy_kernel(size: int) -> Kernel:
    """Buffers: target and source, float32 (size,). `size` is a multiple of `BLOCK_FLOATS`."""

    def kernel(target: UOp, source: UOp) -> UOp:
        block, thread = UOp.special(size // BLOCK_FLOATS, "gidx0"), UOp.special(_THREADS, "lidx0")
        indices = [
            ((block * _LOADS + i) * _THREADS + thread) * _LOAD_FLOATS + j
            for i in range(_LOADS)
            for j in range(_LOAD_FLOATS)
        ]
        values = [load(source, index) for index in indices]
        stores = [store(target, index, value) for index, value in zip(indices, values, strict=True)]
        return finish("copy", stores, n_bytes=2 * 4 * size)

    return Kernel(kernel, ("target",), ("source",))
