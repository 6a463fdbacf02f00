"""Writing a kernel for one core: loops, vectors, registers.

A `Program` is written in the order in which it runs. What it stores, in registers or in memory, later loads
see: it keeps for every buffer that it writes the store that its next load has to come after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeAlias

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

F32, F16, I32, I16, I8, U16, U8 = (
    dtypes.float32,
    dtypes.float16,
    dtypes.int32,
    dtypes.int16,
    dtypes.int8,
    dtypes.uint16,
    dtypes.uint8,
)
Index: TypeAlias = UOp | int
_LOG2_E = 1.4426950408889634
# 2**f for f within a half, to 1e-7: a polynomial fitted at Chebyshev nodes
_EXP2 = (1.0000001192, 0.6931471825, 0.2402210683, 0.05550327152, 0.009676037356, 0.001340043265)


def register_lanes() -> int:
    """How many float32 fit this CPU's vectors: 16 in AVX-512's, 8 in AVX2's or in two of NEON's."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return 8
    return 16 if "avx512f" in flags else 8


def share(n: Index, part: UOp, parts: UOp) -> tuple[Index, Index]:
    """Divides n steps into parts as even as they come: the first step of `part`, and how many it has."""
    first = n * part // parts
    return first, n * (part + 1) // parts - first


def shift_left(v: UOp, bits: Index) -> UOp:
    return v.alu(Ops.SHL, _count(v, bits)) if not isinstance(bits, int) or bits else v


def shift_right(v: UOp, bits: Index) -> UOp:
    return v.alu(Ops.SHR, _count(v, bits)) if not isinstance(bits, int) or bits else v


def _count(v: UOp, bits: Index) -> UOp:
    return UOp.const(bits, v.dtype) if isinstance(bits, int) else bits.cast(v.dtype)


class Program:
    """A kernel under construction, for vectors of `lanes` 32-bit elements."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._numbers = count()
        self._scopes = [_Scope()]

    # --- memory and registers --------------------------------------------------------------------------

    def registers(self, n: int, dtype: DType = F32) -> UOp:
        """Room for n elements that stays in registers where the compiler finds enough of them."""
        return self.scratch(UOp.placeholder((n,), dtype, next(self._numbers), AddrSpace.REG))

    def scratch(self, buffer: UOp) -> UOp:
        """Says of a buffer that the kernel reads what it has written there itself."""
        self._scopes[0].latest[buffer] = buffer
        return buffer

    def load(self, buffer: UOp, at: Index) -> UOp:
        return self._read(buffer, at, 1)

    def index(self, buffer: UOp, at: Index) -> UOp:
        """An int32 of a buffer, to count or to find a place with."""
        return self.load(buffer, at).cast(dtypes.weakint)

    def vector(self, buffer: UOp, at: Index, n: int = 0) -> UOp:
        """n neighbouring elements, `lanes` unless told."""
        return self._read(buffer, at, n or self.lanes)

    def store(self, buffer: UOp, at: Index, value: UOp) -> None:
        """Stores a scalar, or a vector to neighbouring elements."""
        self._write(buffer, at, value.max_numel(), value)

    def fill(self, buffer: UOp, at: Index, value: UOp, n: int = 0) -> None:
        """Stores a scalar to n neighbouring elements, `lanes` unless told."""
        self._write(buffer, at, n or self.lanes, value)

    def _read(self, buffer: UOp, at: Index, n: int) -> UOp:
        value = self._place(buffer, at, n).load()
        if buffer in self._scopes[0].latest:
            self._scopes[-1].reads.setdefault(buffer, []).append(value)
        return value

    def _place(self, buffer: UOp, at: Index, n: int) -> UOp:
        latest, start = self._latest(buffer), UOp.const(at) if isinstance(at, int) else at
        return latest.index(start) if n == 1 else UOp(Ops.SHRINK, src=(latest, start, UOp.const(n)))

    def _latest(self, buffer: UOp) -> UOp:
        """The buffer as it is now: after all that was stored to it so far, and inside the loops around."""
        known = max((i for i, scope in enumerate(self._scopes) if buffer in scope.latest), default=None)
        if known is None:
            return buffer
        latest = self._scopes[known].latest[buffer]
        for scope in self._scopes[known + 1 :]:
            latest = scope.latest[buffer] = latest.after(scope.variable)
        return latest

    def _write(self, buffer: UOp, at: Index, n: int, value: UOp) -> None:
        reads = [r for scope in self._scopes for r in scope.reads.pop(buffer, ())]
        if reads and not set(reads) <= value.backward_slice_with_self.keys():
            raise ValueError(
                "A load may happen as late as its value is used: by then this store has overwritten it."
            )
        store = self._place(buffer, at, n).store(value)
        scope = self._scopes[-1]
        scope.effects.append(store)
        if buffer in self._scopes[0].latest:
            scope.latest[buffer] = self._latest(buffer).after(store)
            scope.written[buffer] = None

    # --- control ---------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, n: Index) -> Iterator[UOp]:
        """A loop of n steps around what is written inside: its variable, just 0 where there is one step."""
        if isinstance(n, int) and n == 1:
            yield UOp.const(0)
            return
        variable = UOp.range(n, next(self._numbers), AxisType.LOOP)
        self._scopes.append(_Scope(variable))
        yield variable
        inner = self._scopes.pop()
        end = UOp.group(*inner.effects).end(variable)
        outer = self._scopes[-1]
        outer.effects.append(end)
        for buffer in inner.written:
            outer.latest[buffer] = self._latest(buffer).after(end)
            outer.written[buffer] = None

    def finish(self, name: str) -> UOp:
        return UOp.group(*self._scopes[0].effects).sink(arg=KernelInfo(name=name), tag=1)

    # --- values ----------------------------------------------------------------------------------------

    def concat(self, a: UOp, b: UOp) -> UOp:
        return UOp.stack(*(v.index(i) for v in (a, b) for i in range(v.max_numel())))

    def multiply_pairs(self, a: UOp, b: UOp) -> UOp:
        """Products of 16-bit integers, neighbours added: int16 (2 * lanes,) each -> int32 (lanes,).

        Compilers know it as one instruction where there is one (pmaddwd), if its sum stays a sum of two.
        Added to a running total they would take it apart and add each half on its own; `concat` of two
        results first, as the operand of one longer addition, keeps it whole."""
        products = a.cast(I32) * b.cast(I32)
        even, odd = (_pick(products, range(p, 2 * self.lanes, 2)) for p in range(2))
        return even + odd

    def repeat_pair(self, pair: UOp) -> UOp:
        """A vector of two elements -> (2 * lanes,), the two in turn."""
        return _pick(pair, [0, 1] * self.lanes)

    def repeat_each(self, v: UOp) -> UOp:
        """A vector -> each of its elements twice."""
        return _pick(v, [i // 2 for i in range(2 * v.max_numel())])

    def across(self, v: UOp, op: Ops) -> UOp:
        """A vector's elements joined into one, by Ops.ADD or Ops.MAX: halves first, as vectors."""
        while (n := v.max_numel()) > 2:
            v = _pick(v, range(n // 2)).alu(op, _pick(v, range(n // 2, n)))
        return v.index(0).alu(op, v.index(1))

    def store_elements(self, buffer: UOp, at: Index, stride: int, v: UOp, together: int = 1) -> None:
        """Stores a vector's elements, `together` neighbours each time, to places `stride` apart."""
        for i in range(0, v.max_numel(), together):
            part = v.index(i) if together == 1 else _pick(v, range(i, i + together))
            self.store(buffer, at + i // together * stride, part)

    def exp(self, x: UOp) -> UOp:
        """e to the x, float32, clamped to what floats hold: 1e-38 to 1e38. Relative error 3e-7 and what
        rounding makes of x log2(e) = n + f, f within a half."""
        t = (x * _LOG2_E).maximum(UOp.const(-126.0, F32)).minimum(UOp.const(127.0, F32))
        biased = (t + 127.5).cast(I32)  # n + 127, the exponent's bits: a cast drops the fraction
        f = t - (biased - 127).cast(F32)
        p = UOp.const(_EXP2[-1], F32)
        for c in reversed(_EXP2[:-1]):
            p = p * f + c
        return shift_left(biased, 23).bitcast(F32) * p


def _pick(v: UOp, elements: Iterable[int]) -> UOp:
    return v.index(UOp.stack(*(UOp.const(i) for i in elements)))


class _Scope:
    """What a loop's body, or the whole program, has done so far."""

    def __init__(self, variable: UOp | None = None) -> None:
        self.variable = variable
        self.effects: list[UOp] = []
        self.latest: dict[UOp, UOp] = {}
        self.reads: dict[UOp, list[UOp]] = {}  # since the last store
        self.written: dict[UOp, None] = {}
