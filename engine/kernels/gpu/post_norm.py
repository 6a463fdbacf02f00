"""The sum of the residual stream and a product that is normed first, in decode.

A norm needs the whole product, so the product's kernel stores its rows and partial sums of their squares
(`engine.kernels.gpu.matvec.STORE_SQUARES`), and another kernel adds them.
"""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.uops import (
    after_store,
    f32,
    finish,
    inverse_rms,
    load,
    load_run,
    shared,
    store,
    tree,
)
from engine.kernels.gpu.weight_layout import permuted

_THREADS = 32  # of a block, one warp, so that its sums wait for no other; each has an element


def add_normed_blocks(n: int) -> int:
    """The blocks of `add_normed`, which each store a partial sum of squares."""
    return -(-n // _THREADS)


@functools.cache
def add_normed(n: int, n_norm_sums: int, copies: int, eps: float) -> Kernel:
    """Norms a product of n rows, adds it to the residual stream, and prepares the stream for the next products.
    Buffers: the outs of `engine.kernels.gpu.matvec.add_residual` (the stream, float32 (n,); partial sums of its
    squares, float32 (add_normed_blocks(n),); `copies` permuted vectors); the product, float32 (n,); partial sums of its
    squares, float32 (n_norm_sums,), another array than that of the outs; the weight of the product's norm, float32
    (n,); for each copy the next norm's weight times the prescale, float32 (n,)."""
    steps = -(-n_norm_sums // _THREADS)

    def kernel(h: UOp, norm_sums: UOp, *rest: UOp) -> UOp:
        outs, (product, product_sums, norm_weight, *weights) = rest[:copies], rest[copies:]
        thread, block = UOp.special(_THREADS, "lidx0"), UOp.special(add_normed_blocks(n), "gidx0")
        row = block * _THREADS + thread
        ok = None if n % _THREADS == 0 else row < n
        stream, added = load(h, row, ok), load(product, row, ok) * load(norm_weight, row, ok)
        indices = [thread + s * _THREADS for s in range(steps)]
        own = [
            load(product_sums, i, None if n_norm_sums % _THREADS == 0 else i < n_norm_sums) for i in indices
        ]
        sums = after_store(shared(_THREADS, slot=0), thread, tree(own))
        value = stream + added * inverse_rms(tree(load_run(sums, 0, _THREADS)), n, eps)
        square = value * value if ok is None else ok.where(value * value, f32(0))
        squares = after_store(shared(_THREADS, slot=1), thread, square)
        stores = [store(h, row, value, ok)]
        stores.append(store(norm_sums, block, tree(load_run(squares, 0, _THREADS)), thread.eq(0)))
        for out, weight in zip(outs, weights, strict=True):
            stores.append(store(out, permuted(row, n), value * load(weight, row, ok), ok))
        return finish(f"add_normed_{n}_{n_norm_sums}", stores)

    return kernel
