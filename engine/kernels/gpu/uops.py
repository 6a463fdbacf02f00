"""Small words for writing kernels as UOps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from tinygrad import Device, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops

F32, F16, I32, U32, INDEX = dtypes.float32, dtypes.float16, dtypes.int32, dtypes.uint32, dtypes.weakint
LOWEST = -1e30  # stands for minus infinity where an infinity would make NaNs


def f32(value: float) -> UOp:
    return UOp.const(float(value), F32)


def u32(value: int) -> UOp:
    return UOp.const(value, U32)


def shift_right(word: UOp, bits: int | UOp) -> UOp:
    if isinstance(bits, int):
        return word.alu(Ops.SHR, u32(bits)) if bits else word
    return word.alu(Ops.SHR, bits.cast(U32))


def shift(word: UOp, bits: int) -> UOp:
    """To the right by `bits`, to the left where they are negative."""
    return shift_right(word, bits) if bits >= 0 else word.alu(Ops.SHL, u32(-bits))


def mask(word: UOp, bits: int) -> UOp:
    return word if bits == 0xFFFFFFFF else word.alu(Ops.AND, u32(bits))


def any_of(words: Sequence[UOp]) -> UOp:
    return functools.reduce(lambda a, b: a.alu(Ops.OR, b), words)


def maximum(values: Sequence[UOp]) -> UOp:
    return tree(values, lambda a, b: a.alu(Ops.MAX, b))


def chain(values: Iterable[UOp]) -> UOp:
    """A sum from left to right: each product is added by one FMA."""
    return functools.reduce(lambda a, b: a + b, values)


def tree(values: Sequence[UOp], join: Callable[[UOp, UOp], UOp] = lambda a, b: a + b) -> UOp:
    """A reduction in log2(n) dependent steps."""
    values = list(values)
    while len(values) > 1:
        pairs = zip(values[0::2], values[1::2], strict=False)
        values = [join(a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


def at(buffer: UOp, index: UOp | int, valid: UOp | None = None) -> UOp:
    """A place in a buffer, to load from or store to; where it is not `valid` a load gives 0 and nothing is
    stored."""
    place = UOp.const(index) if isinstance(index, int) else index
    return buffer.index(place if valid is None else place.valid(valid))


def load(buffer: UOp, index: UOp | int, valid: UOp | None = None) -> UOp:
    return at(buffer, index, valid).load()


def load_index(buffer: UOp, index: int, limit: int) -> UOp:
    """An int32 of a buffer, to be used as an index below `limit` (what lies beyond is clamped)."""
    return load(buffer, index).maximum(0).minimum(limit - 1).cast(INDEX)


def shared(size: int, slot: int, dtype: DType = F32) -> UOp:
    """Memory that the threads of a block share. `slot` tells arrays of one kernel apart."""
    return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.LOCAL)


def half_registers() -> DType:
    """What registers hold half-precision numbers as: themselves, or float32 on a device that does not know them,
    like the emulator of tests."""
    known = Device[Device.DEFAULT].renderer.supported_dtypes()
    return F16 if F16 in known else F32


def registers(size: int, slot: int, dtype: DType = F32) -> UOp:
    return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.REG)


def finish(name: str, stores: Sequence[UOp], n_bytes: int = 0, n_ops: int = 0) -> UOp:
    """The kernel that does `stores`. `n_bytes` it must move and `n_ops` it must do are for its profile."""
    estimates = Estimates(ops=n_ops, lds=n_bytes, mem=n_bytes)
    info = KernelInfo(name=name, estimates=estimates)
    return UOp.group(*stores).sink(arg=info, tag=1)  # the tag: nothing in it to optimize
