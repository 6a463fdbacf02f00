"""Kernels that do one thing only, so that their times are rates of a GPU (`rates`)."""

from __future__ import annotations

import functools

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.products.matmul import wmma
from engine.targets.nvidia.kernels.uops import (
    F32,
    INDEX,
    U32,
    chain,
    finish,
    load,
    load_run,
    mask,
    registers,
    shift_right,
    store,
    store_run,
    u32,
    zeroed_registers,
)

THREADS = 256  # of a block
FACTORS = 40  # at least what a warp's threads load
_LINK_BLOCKS = 64
LINK_FLOATS = _LINK_BLOCKS * THREADS
CHASED = 96  # loads of a chase
_APART = 16411  # numbers between two of them: no line of a cache has both
_STEPS = 256  # of a loop
_FIELDS, _BITS, _WITHIN = 8, 4, 5  # of a word: fields, their bits, and how many lie in a float's significand
_WORDS = FACTORS // _FIELDS
_SUMS = 4  # products of a warp that do not wait for each other
_PRODUCT_OPS = 2 * 16 * 8 * 16  # of an instruction of tensor cores


@functools.cache
def link() -> Kernel:
    """A link of a chain of kernels, each of which waits for the one before. Buffers: target and source, float32
    (LINK_FLOATS,)."""

    def kernel(target: UOp, source: UOp) -> UOp:
        place = UOp.special(_LINK_BLOCKS, "gidx0") * THREADS + UOp.special(THREADS, "lidx0")
        return finish("probe_link", [store(target, place, load(source, place))])

    return Kernel(kernel, ("target",), ("source",))


@functools.cache
def chase(size: int) -> Kernel:
    """CHASED loads of one thread, each of which waits for the one before. Buffers: place, uint32 (1,), where the first
    one is and, in the end, that of the next chase; zeros, uint32 (size,), a power of two beyond the caches."""

    def kernel(place: UOp, zeros: UOp) -> UOp:
        thread, now = UOp.special(1, "lidx0"), registers(1, 0, U32)
        now = now.after(store(now, 0, load(place, thread)))
        step = UOp.range(CHASED, 0, AxisType.REDUCE)
        at = load(now.after(step), 0)
        following = mask(at + load(zeros, mask(at, size - 1).cast(INDEX)) + u32(_APART), size - 1)
        now = now.after(store(now, 0, following).end(step))
        return finish("probe_chase", [store(place, thread, load(now, 0))])

    return Kernel(kernel, ("place",), ("zeros",))


@functools.cache
def unpack(blocks: int) -> Kernel:
    """Integers of 4 bits times numbers, as a product of one token has them (`weights.bit_packing`). Buffers: out,
    float32 (blocks * THREADS,); x, float32 (FACTORS,)."""

    def kernel(out: UOp, x: UOp) -> UOp:
        place = UOp.special(blocks, "gidx0") * THREADS + UOp.special(THREADS, "lidx0")
        xs, step = load_run(x, 0, FACTORS), UOp.range(_STEPS, 0, AxisType.REDUCE)
        seed = step.cast(U32) * u32(0x9E3779B1) + place.cast(U32)
        terms = []
        for i in range(_WORDS):
            word = seed.alu(Ops.XOR, u32(0x11111111 * (i + 1)))
            upper = shift_right(word, (_FIELDS - _WITHIN) * _BITS)
            for j in range(_FIELDS):
                within = j < _WITHIN
                bit = _BITS * (j if within else j - _FIELDS + _WITHIN)
                field = mask(word if within else upper, 15 << bit)
                terms.append(field.bitcast(F32) * xs[i * _FIELDS + j])
        return finish("probe_unpack", [store(out, place, chain(terms).reduce(step, arg=Ops.ADD))])

    return Kernel(kernel, ("out",), ("x",))


def unpacked(blocks: int) -> int:
    """Integers that `unpack` multiplies."""
    return blocks * THREADS * _STEPS * FACTORS


@functools.cache
def multiply(blocks: int) -> Kernel:
    """Products on tensor cores, whose operands are in registers. Buffers: out, float32 (blocks * THREADS,); x, float16
    (FACTORS,)."""

    def kernel(out: UOp, x: UOp) -> UOp:
        lane, warp = UOp.special(32, "lidx0"), UOp.special(THREADS // 32, "lidx1")
        place = (UOp.special(blocks, "gidx0") * (THREADS // 32) + warp) * 32 + lane
        left, right = load_run(x, lane, 8), load_run(x, lane, 4)
        acc, step = zeroed_registers(_SUMS * 4, 0), UOp.range(_STEPS, 0, AxisType.REDUCE)
        sums = load_run(acc.after(step), 0, _SUMS * 4)
        new = [v for i in range(0, _SUMS * 4, 4) for v in wmma(left, right, sums[i : i + 4])]
        acc = acc.after(UOp.group(*store_run(acc, 0, new)).end(step))
        return finish("probe_multiply", [store(out, place, chain(load_run(acc, 0, _SUMS * 4)))])

    return Kernel(kernel, ("out",), ("x",))


def multiplied(blocks: int) -> int:
    """Operations of `multiply`."""
    return blocks * (THREADS // 32) * _STEPS * _SUMS * _PRODUCT_OPS
