"""Helpers for writing GPU kernels as UOps: constants, bit operations, reductions, memory, and common formulas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import KernelInfo, Ops

from engine.kernels.target import renderer

F32, F16, I32, U32, INDEX = dtypes.float32, dtypes.float16, dtypes.int32, dtypes.uint32, dtypes.weakint
LOWEST = -1e30  # a score below all others; minus infinity would give NaN in a difference
LOG2_E = 1.4426950408889634

Activation = Literal["silu", "gelu", "swiglu_oai", "relu", "relu2"] | tuple[float, float]
"""The function of a gated feed-forward layer's gate; GELU is the form with tanh. "swiglu_oai" is gpt-oss's: SiLU of
1.702 * gate, over 1.702, times up + 1, of a gate of at most 7 and an up from -7 to 7. Two numbers are limits of SiLU's
gate, and of up (`SiluLimits`)."""


UngatedActivation = Literal["silu", "gelu", "exact gelu", "quick gelu", "relu", "relu2"]
"""The function of a feed-forward layer without a gate; the exact GELU is the form with erf, and the quick one x *
sigmoid(1.702 x)."""


def f32(value: float) -> UOp:
    return UOp.const(float(value), F32)


def u32(value: int) -> UOp:
    return UOp.const(value, U32)


# --- bits ----------------------------------------------------------------------------------------------


def shift_right(word: UOp, bits: int | UOp) -> UOp:
    if isinstance(bits, int):
        return word.alu(Ops.SHR, u32(bits)) if bits else word
    return word.alu(Ops.SHR, bits.cast(U32))


def shift(word: UOp, bits: int) -> UOp:
    """Shifts right by `bits`, or left if they are negative."""
    return shift_right(word, bits) if bits >= 0 else word.alu(Ops.SHL, u32(-bits))


def mask(word: UOp, bits: int) -> UOp:
    return word if bits == 0xFFFFFFFF else word.alu(Ops.AND, u32(bits))


def bitwise_or(words: Sequence[UOp]) -> UOp:
    return functools.reduce(lambda a, b: a.alu(Ops.OR, b), words)


# --- reductions ----------------------------------------------------------------------------------------


def maximum(values: Sequence[UOp]) -> UOp:
    return tree(values, lambda a, b: a.alu(Ops.MAX, b))


def chain(values: Iterable[UOp]) -> UOp:
    """A sum from left to right: the compiler makes one FMA of each product and its addition."""
    return functools.reduce(lambda a, b: a + b, values)


def tree(values: Sequence[UOp], join: Callable[[UOp, UOp], UOp] = lambda a, b: a + b) -> UOp:
    """A reduction, by default a sum, in log2(n) dependent steps."""
    values = list(values)
    while len(values) > 1:
        pairs = zip(values[0::2], values[1::2], strict=False)
        values = [join(a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


# --- memory --------------------------------------------------------------------------------------------


def at(buffer: UOp, index: UOp | int, valid: UOp | None = None) -> UOp:
    """An element of a buffer, to load or to store. If it is not `valid`, a load gives 0 and a store does nothing."""
    index = UOp.const(index) if isinstance(index, int) else index
    return buffer.index(index if valid is None else index.valid(valid))


def load(buffer: UOp, index: UOp | int, valid: UOp | None = None) -> UOp:
    return at(buffer, index, valid).load()


def store(buffer: UOp, index: UOp | int, value: UOp, valid: UOp | None = None) -> UOp:
    return at(buffer, index, valid).store(value)


def load_run(buffer: UOp, first: UOp | int, n: int, valid: UOp | None = None) -> list[UOp]:
    """n neighbouring elements from index `first` on."""
    return [load(buffer, first + i, valid) for i in range(n)]


def store_run(
    buffer: UOp, first: UOp | int, values: Iterable[UOp], valid: UOp | None = None, stride: int = 1
) -> list[UOp]:
    """Stores values, cast to the buffer's type, to indices `stride` apart from `first` on."""
    dtype = buffer.dtype
    return [store(buffer, first + i * stride, x.cast(dtype), valid) for i, x in enumerate(values)]


def load_index(buffer: UOp, index: int | UOp, limit: int) -> UOp:
    """An int32 of a buffer as an index, clamped to 0 <= index < `limit`."""
    return load(buffer, index).maximum(0).minimum(limit - 1).cast(INDEX)


def shared(size: int, slot: int, dtype: DType = F32) -> UOp:
    """An array in the shared memory of a block. Each array of a kernel has a `slot` of its own."""
    return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.LOCAL)


def registers(size: int, slot: int, dtype: DType = F32) -> UOp:
    """An array in a thread's registers. Each array of a kernel has a `slot` of its own."""
    return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.REG)


def zeroed_registers(size: int, slot: int) -> UOp:
    """An array of float32 zeros in a thread's registers."""
    array = registers(size, slot)
    return array.after(UOp.group(*store_run(array, 0, [f32(0)] * size)))


def all_of(*conditions: UOp | None) -> UOp | None:
    """Whether all conditions hold; None stands for a condition that always holds."""
    return functools.reduce(lambda a, b: b if a is None else a if b is None else a & b, conditions)


def half_registers() -> DType:
    """The type in which registers hold half-precision numbers: float16, or float32 if the device has no float16
    (tinygrad's emulator)."""
    return F16 if F16 in renderer().supported_dtypes() else F32


def after_store(array: UOp, index: UOp | int, value: UOp, valid: UOp | None = None) -> UOp:
    """The array after each thread has stored `value` at its `index`. Loads from shared memory then wait for all threads
    of the block."""
    return array.after(store(array, index, value, valid))


def block_totals(own: Sequence[UOp], thread: UOp, threads: int, slot: int) -> list[UOp]:
    """The sums over all threads of a block of a few numbers that each has. Takes `slot` and the next one."""
    lanes = 32
    assert len(own) * lanes <= threads
    sums = shared(len(own) * threads, slot)
    stores = [store(sums, k * threads + thread, value) for k, value in enumerate(own)]
    sums, adds = sums.after(UOp.group(*stores)), thread < len(own) * lanes
    first = thread // lanes * threads + thread % lanes
    lane_sum = tree([load(sums, first + k, adds) for k in range(0, threads, lanes)])
    lane_sums = after_store(shared(len(own) * lanes, slot + 1), thread, lane_sum, adds)
    return [tree(load_run(lane_sums, k * lanes, lanes)) for k in range(len(own))]


# --- formulas ------------------------------------------------------------------------------------------


def sigmoid(x: UOp) -> UOp:
    """On CUDA by one instruction, with an error of its last bit: a division has a branch for denormal numbers, behind
    which nothing else begins, so that a thread's divisions wait for each other."""
    divisor = f32(1) + (x * f32(-LOG2_E)).exp2()
    if not isinstance(renderer(), CUDARenderer):
        return divisor.reciprocal()
    return UOp(Ops.CUSTOM, F32, (divisor,), "__fdividef(1.0f, {0})")


def softplus(x: UOp) -> UOp:
    magnitude = x.maximum(x * f32(-1))
    return x.maximum(0.0) + (f32(1) + (magnitude * f32(-LOG2_E)).exp2()).log2() * f32(1 / LOG2_E)


def curved(x: UOp, curve: UOp) -> UOp:
    """xIELU of x (`engine.description.feed_forward.Dense`), whose four numbers are a buffer."""
    n, p, b, e = load_run(curve, 0, 4)
    negative = n * ((x.minimum(e) * f32(LOG2_E)).exp2() - f32(1) - x)
    return (x > 0).where(p * x * x, negative) + b * x


def gated(gate: UOp, up: UOp, activation: Activation) -> UOp:
    """activation(gate) * up. All activations but what is positive and its square are gate * sigmoid(x); an infinite
    power of two gives zero."""
    if activation in ("relu", "relu2"):
        positive = gate.maximum(0.0)
        return positive * (positive if activation == "relu2" else f32(1)) * up
    if isinstance(activation, tuple):
        most, limit = activation
        gate, up = gate.minimum(most), up.maximum(-limit).minimum(limit)
    if activation == "swiglu_oai":
        gate, up = gate.minimum(7.0), up.maximum(-7.0).minimum(7.0) + f32(1)
    x = gate * f32(1.702) if activation == "swiglu_oai" else gate
    # (1 + tanh(y)) / 2 = sigmoid(2 * y), of y = sqrt(2 / pi) * (gate + 0.044715 * gate^3).
    if activation == "gelu":
        x = gate * (f32(1) + f32(0.044715) * gate * gate) * f32(2 * math.sqrt(2 / math.pi))
    return gate * sigmoid(x) * up


def activated(x: UOp, activation: UngatedActivation) -> UOp:
    """activation(x)."""
    if activation == "quick gelu":
        return x * sigmoid(x * f32(1.702))
    if activation != "exact gelu":
        return gated(x, f32(1), activation)
    # erf with an error of 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26
    z = x.maximum(x * f32(-1)) * f32(0.5**0.5)
    t = (f32(1) + z * f32(0.3275911)).reciprocal()
    series = f32(0)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + f32(factor)) * t
    tail = series * (z * z * f32(-LOG2_E)).exp2()
    return x * f32(0.5) * (x >= 0).where(f32(2) - tail, tail)


def soft_capped(value: UOp, cap: float) -> UOp:
    """cap * tanh(value / cap); the value itself if there is no cap (0)."""
    if not cap:
        return value
    sigmoid = (f32(1) + (value * f32(-2 * LOG2_E / cap)).exp2()).reciprocal()
    return (sigmoid * f32(2) - f32(1)) * f32(cap)


def within(value: UOp, limit: float) -> UOp:
    """A value, cut to -limit to limit; the value itself if there is no limit (0)."""
    return value.maximum(-limit).minimum(limit) if limit else value


def inverse_rms(sum_of_squares: UOp, n: int, eps: float) -> UOp:
    """The factor of an RMS norm over n elements, on CUDA by one instruction, as in `sigmoid`."""
    mean = sum_of_squares * f32(1.0 / n) + f32(eps)
    if not isinstance(renderer(), CUDARenderer):
        return mean.sqrt().reciprocal()
    return UOp(Ops.CUSTOM, F32, (mean,), "rsqrtf({0})")


def least_counting(mean: UOp, squares: UOp, n: int, sparsity: float) -> UOp:
    """What n gates have to exceed to count, from their mean and the sum of their squares
    (`engine.description.feed_forward.Dense`)."""
    deviation = ((squares - mean * mean * f32(n)) * f32(1 / (n - 1))).maximum(0.0).sqrt()
    return mean + deviation * f32(sparsity)


def rotated(x: UOp, partner: UOp, is_first_half: UOp, cos: UOp, sin: UOp) -> UOp:
    """An element of a head after rotary position embedding; `partner` is the element half a head away."""
    return x * cos + is_first_half.where(partner * f32(-1), partner) * sin


# -------------------------------------------------------------------------------------------------------


def finish(
    name: str, stores: Sequence[UOp], n_bytes: int = 0, n_ops: int = 0, effects: Sequence[UOp] = ()
) -> UOp:
    """The graph of the kernel that does `stores`, and what has other `effects`. The bytes that it must move and the
    operations that it must do are for its profile. The tag keeps tinygrad from optimizing it."""
    estimates = Estimates(ops=n_ops, lds=n_bytes, mem=n_bytes)
    return UOp.group(*stores).sink(*effects, arg=KernelInfo(name=name, estimates=estimates), tag=1)
