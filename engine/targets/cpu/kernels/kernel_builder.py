"""Builds a kernel for one core as a UOp graph: loops, vectors and registers.

A `KernelBuilder` is called in the order in which the kernel runs. A load sees all earlier stores, to registers and to
memory: for every buffer that the kernel writes, the builder remembers the store that the next load depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TypeAlias

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from engine.targets.cpu.kernels.lanes import adds_pairs

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
# 2**f for -0.5 <= f <= 0.5, with an error of 1e-7: a polynomial fitted at Chebyshev nodes, lowest power first
_EXP2 = (1.0000001192, 0.6931471825, 0.2402210683, 0.05550327152, 0.009676037356, 0.001340043265)


def even_share(n: Index, part: UOp, parts: UOp) -> tuple[Index, Index]:
    """Divides n steps into `parts` whose sizes differ by one at most: the first step of `part`, and how many it has."""
    first = n * part // parts
    return first, n * (part + 1) // parts - first


def shift_left(v: UOp, bits: Index) -> UOp:
    return v.alu(Ops.SHL, _count(v, bits)) if not isinstance(bits, int) or bits else v


def shift_right(v: UOp, bits: Index) -> UOp:
    return v.alu(Ops.SHR, _count(v, bits)) if not isinstance(bits, int) or bits else v


def add(values: Iterable[UOp]) -> UOp:
    return functools.reduce(lambda a, b: a + b, values)


def _count(v: UOp, bits: Index) -> UOp:
    return UOp.const(bits, v.dtype) if isinstance(bits, int) else bits.cast(v.dtype)


class KernelBuilder:
    """A kernel under construction, with vectors of `lanes` 32-bit elements."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._numbers = count()
        self._scopes = [_Scope()]

    # --- memory and registers --------------------------------------------------------------------------

    def registers(self, n: int, dtype: DType = F32) -> UOp:
        """An array of n elements that the compiler keeps in registers if it can. It has four in place of three, since
        clang writes a vector of three as one of four."""
        return self.scratch(UOp.placeholder((4 if n == 3 else n,), dtype, next(self._numbers), AddrSpace.REG))

    def zeros(self, n: int = 0, dtype: DType = F32) -> UOp:
        """`registers` that are set to 0 at this point of the kernel, by default `lanes`."""
        array = self.registers(n or self.lanes, dtype)
        self.fill(array, 0, UOp.const(0, dtype), n)
        return array

    def scratch(self, buffer: UOp) -> UOp:
        """Declares that the kernel loads from this buffer what it has stored there itself."""
        self._scopes[0].latest[buffer] = buffer
        return buffer

    def load(self, buffer: UOp, at: Index) -> UOp:
        return self._read(buffer, at, 1)

    def index(self, buffer: UOp, at: Index) -> UOp:
        """An int32 of a buffer, as a loop count or an index."""
        return self.load(buffer, at).cast(dtypes.weakint)

    def vector(self, buffer: UOp, at: Index, n: int = 0) -> UOp:
        """n neighbouring elements, by default `lanes`."""
        return self._read(buffer, at, n or self.lanes)

    def store(self, buffer: UOp, at: Index, value: UOp) -> None:
        """Stores a scalar, or a vector to neighbouring elements. Raises ValueError if a loaded value would be used
        after this store overwrites it."""
        self._write(buffer, at, value.max_numel(), value)

    def fill(self, buffer: UOp, at: Index, value: UOp, n: int = 0) -> None:
        """Stores a scalar to n neighbouring elements, by default `lanes`."""
        self._write(buffer, at, n or self.lanes, value)

    def _read(self, buffer: UOp, at: Index, n: int) -> UOp:
        value = self._elements(buffer, at, n).load()
        if buffer in self._scopes[0].latest:
            self._scopes[-1].reads.setdefault(buffer, []).append(value)
        return value

    def _elements(self, buffer: UOp, at: Index, n: int) -> UOp:
        latest, start = self._latest(buffer), UOp.const(at) if isinstance(at, int) else at
        return latest.index(start) if n == 1 else UOp(Ops.SHRINK, src=(latest, start, UOp.const(n)))

    def _latest(self, buffer: UOp) -> UOp:
        """The buffer after all stores so far, inside the current loops."""
        innermost = max((i for i, scope in enumerate(self._scopes) if buffer in scope.latest), default=None)
        if innermost is None:
            return buffer
        latest = self._scopes[innermost].latest[buffer]
        for scope in self._scopes[innermost + 1 :]:
            latest = scope.latest[buffer] = latest.after(scope.variable)
        return latest

    def _write(self, buffer: UOp, at: Index, n: int, value: UOp) -> None:
        reads = [r for scope in self._scopes for r in scope.reads.pop(buffer, ())]
        if reads and not set(reads) <= value.backward_slice_with_self.keys():
            raise ValueError("This store would overwrite a value that is loaded before it but used after it.")
        store = self._elements(buffer, at, n).store(value)
        scope = self._scopes[-1]
        scope.effects.append(store)
        if buffer in self._scopes[0].latest:
            scope.latest[buffer] = self._latest(buffer).after(store)
            scope.written[buffer] = None

    # --- control ---------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, n: Index) -> Iterator[UOp]:
        """A loop of n steps around its body; gives its variable, or the constant 0 if n is 1."""
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
        """The kernel's graph, a SINK. The tag keeps tinygrad from optimizing it. Nobody reads the estimates, for which
        tinygrad would take longer than for the code of a kernel with many loops."""
        info = KernelInfo(name=name, estimates=Estimates())
        return UOp.group(*self._scopes[0].effects).sink(arg=info, tag=1)

    # --- values ----------------------------------------------------------------------------------------

    def concat(self, a: UOp, b: UOp) -> UOp:
        return UOp.stack(*(v.index(i) for v in (a, b) for i in range(v.max_numel())))

    def interleave(self, a: UOp, b: UOp) -> UOp:
        """Elements of two vectors in turns: (n,) each -> (2 * n,)."""
        return UOp.stack(*(v.index(i) for i in range(a.max_numel()) for v in (a, b)))

    def multiply_pair(self, a: UOp, pair: UOp) -> UOp:
        """Products of pairs of 16-bit integers with one pair, summed: int16 (2 * lanes,) and (2,) -> int32 (lanes,).

        On x86 it is one instruction (pmaddwd) if the sum has exactly two terms. If it were added to a running total
        directly, compilers would split it and add each half separately. `concat` of two results, as one operand of a
        longer addition, keeps it whole. Arm has instructions that multiply by an element and add."""
        if adds_pairs():
            products = a.cast(I32) * _pick(pair, [0, 1] * self.lanes).cast(I32)
            return add(_pick(products, range(p, 2 * self.lanes, 2)) for p in range(2))
        columns = (_pick(a, range(p, 2 * self.lanes, 2)).cast(I32) for p in range(2))
        return add(column * _pick(pair, [p] * self.lanes).cast(I32) for p, column in enumerate(columns))

    def repeat_each(self, v: UOp) -> UOp:
        """Each element of a vector twice: (n,) -> (2 * n,)."""
        return _pick(v, [i // 2 for i in range(2 * v.max_numel())])

    def look_up(self, numbers: Sequence[int], at: UOp) -> UOp:
        """The numbers at each index of a vector, int16. There are at most as many numbers as indices: compilers make
        one instruction of it where the table is a vector of as many elements (see `lanes.looks_up`)."""
        n = at.max_numel()
        table = UOp.stack(*(UOp.const(numbers[min(i, len(numbers) - 1)], I16) for i in range(n)))
        return table.index(UOp.stack(*(at.index(i).cast(I32) for i in range(n))))

    def part(self, v: UOp, first: int, n: int) -> UOp:
        """n neighbouring elements of a vector."""
        return v.index(first) if n == 1 else _pick(v, range(first, first + n))

    def across(self, v: UOp, op: Ops) -> UOp:
        """Reduces a vector to a scalar by Ops.ADD or Ops.MAX, halving it until two elements are left."""
        while (n := v.max_numel()) > 2:
            v = _pick(v, range(n // 2)).alu(op, _pick(v, range(n // 2, n)))
        return v.index(0).alu(op, v.index(1))

    def store_elements(self, buffer: UOp, at: Index, stride: int, v: UOp, together: int = 1) -> None:
        """Stores runs of `together` neighbouring elements of a vector to places that lie `stride` apart."""
        for i in range(0, v.max_numel(), together):
            part = v.index(i) if together == 1 else _pick(v, range(i, i + together))
            self.store(buffer, at + i // together * stride, part)

    def exp(self, x: UOp) -> UOp:
        """e to the power x, float32, clamped to normal floats (1e-38 to 1e38): 2**n * 2**f, with x log2(e) = n + f and
        f in [-0.5, 0.5]. The relative error is 3e-7, plus that of rounding x log2(e)."""
        t = (x * _LOG2_E).maximum(UOp.const(-126.0, F32)).minimum(UOp.const(127.0, F32))
        biased = (t + 127.5).cast(I32)  # n + 127, the exponent's bits (a cast truncates)
        f = t - (biased - 127).cast(F32)
        p = UOp.const(_EXP2[-1], F32)
        for c in reversed(_EXP2[:-1]):
            p = p * f + c
        return shift_left(biased, 23).bitcast(F32) * p


def _pick(v: UOp, elements: Iterable[int]) -> UOp:
    return v.index(UOp.stack(*(UOp.const(i) for i in elements)))


class _Scope:
    """What the body of a loop, or the whole kernel, has done so far."""

    def __init__(self, variable: UOp | None = None) -> None:
        self.variable = variable
        self.effects: list[UOp] = []
        self.latest: dict[UOp, UOp] = {}
        self.reads: dict[UOp, list[UOp]] = {}  # loads since the last store
        self.written: dict[UOp, None] = {}  # an ordered set
