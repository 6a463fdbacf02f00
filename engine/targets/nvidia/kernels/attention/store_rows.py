"""Stores the keys and values of the rows of a step before attention reads them (`Heads.is_stored`), so that a row
attends to others of its own sequence."""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.attention.decode_block import DecodeBlock
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.uops import finish, shared, store

_THREADS = 128


@functools.cache
def store_rows(heads: Heads, tokens: int, over_heads: bool) -> Kernel:
    """Stores those of `tokens` rows. Buffers: those of `DecodeBlock`, as far as they are of keys and values."""
    h = heads

    def kernel(**buffers: UOp | list[UOp]) -> UOp:
        thread = UOp.special(_THREADS, "lidx0")
        block = DecodeBlock(h, 1, 0, thread, _THREADS, buffers, over_heads, tokens)
        key, value = shared(block.n_rotated, 1), shared(h.dim, 8)
        stores = [store(key, e, x) for e, x in block.rotate([])]
        stores += block.new_value(value, UOp.const(0), h.dim)
        ready = UOp.group(*stores)
        name = f"store_rows_{h.name}_{tokens}{'_over_heads' * over_heads}"
        return finish(name, block.store_token(key.after(ready), value.after(ready)))

    inputs = "rows", "cos", "sin", "tables", "state", h.norm_eps is not None and "norms"
    return Kernel(kernel, (("cache", len(h.cache_planes)),), inputs)
