"""Copying memory and nothing else: what a GPU's memory gives at most."""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.uops import at, finish, load

THREADS = 256
_EACH = 4  # float32s of a load: 16 bytes, the most that a thread can ask for at once
_LOADS = 4  # on their way at a time
PIECE = THREADS * _EACH * _LOADS
"""float32s that a block copies."""


@functools.cache
def copying(size: int) -> Kernel:
    """Buffers: the copy and what is copied, float32 (size,), a multiple of `PIECE`."""

    def kernel(target: UOp, source: UOp) -> UOp:
        block, thread = UOp.special(size // PIECE, "gidx0"), UOp.special(THREADS, "lidx0")
        places = [
            ((block * _LOADS + i) * THREADS + thread) * _EACH + j for i in range(_LOADS) for j in range(_EACH)
        ]
        values = [load(source, place) for place in places]
        stores = [at(target, place).store(value) for place, value in zip(places, values, strict=True)]
        return finish("copy", stores, n_bytes=2 * 4 * size)

    return kernel
