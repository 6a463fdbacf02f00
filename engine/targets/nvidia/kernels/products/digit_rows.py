"""Rows of a matrix with a codebook times one vector, by instructions that multiply four bytes at a time.

Codes are looked up four at a time, as bytes of a word. Each of them would be masked before float32 could multiply it,
and such instructions are what bounds these products. An instruction that adds four products of bytes takes the word as
it is. So the vector becomes integers of three digits, bytes with a sign: a kernel before the product divides it, in
groups of 32 columns, whose largest number gives the factor. The rest is below 2**-23 of that, and sums are whole
numbers, so the result is as exact as with float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints
from engine.targets.nvidia.kernels.half_words import is_cuda
from engine.targets.nvidia.kernels.uops import (
    F32,
    I32,
    U32,
    bitwise_or,
    f32,
    finish,
    load,
    mask,
    maximum,
    shift,
    shift_right,
    store,
    tree,
    u32,
)
from engine.targets.nvidia.kernels.weights.bit_packing import CENTER, BitPacking, code_words
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

DIGITS = 3
_GROUP, _BYTES = 32, 4  # columns with a factor; bytes of a word
_WORDS = UNIT // _BYTES  # of a unit, for each digit
_MOST = 127.0 * 2**16  # the largest integer of three such digits, but for those of the lower two
_THREADS = 32
_EVEN = 0x808080  # makes digits from 0 to 255, and an exclusive or with it makes them have signs again


def serves(layout: WeightLayout, cols: int) -> bool:
    """Whether there are such kernels for a matrix."""
    format = layout.format
    large = layout.has_codes and format is not None and len(format.codebook) > 8
    return large and layout.group == _GROUP and cols % UNIT == 0


def sizes(cols: int) -> tuple[int, int]:
    """Words of a vector's digits, and its factors."""
    return DIGITS * _WORDS * units_of(cols), UNIT // _GROUP * units_of(cols)


@functools.cache
def divide(layout: WeightLayout, cols: int) -> Kernel:
    """Divides the vector of a product. Buffers: digits, uint32 [digit, word // 4 of the unit, unit, word % 4]; factors,
    float32 [unit, group] (`sizes`); x, float32 (permuted_size(cols),), scaled for the layout."""
    units, groups = units_of(cols), sizes(cols)[1]
    positions = [BitPacking(layout.input_scale_bits).position(j) for j in range(_BYTES)]

    def kernel(digits: UOp, factors: UOp, x: UOp) -> UOp:
        item = UOp.special(-(-groups // _THREADS), "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
        ok = None if groups % _THREADS == 0 else item < groups
        unit, first = item // (UNIT // _GROUP), item % (UNIT // _GROUP) * (_GROUP // _BYTES)
        values = [
            load(x, ((first + j // _BYTES) * units + unit) * 4 + j % _BYTES, ok)
            * f32(2.0 ** (positions[j % _BYTES] - CENTER))
            for j in range(_GROUP)
        ]
        most, total = maximum([v.maximum(v * f32(-1)) for v in values]), tree(values)
        inverse = (most > 0).where(f32(_MOST) * most.reciprocal(), f32(0))
        rounded = [(v * inverse + (v < 0).where(f32(-0.5), f32(0.5))).cast(I32) for v in values]
        integers = [(n + _EVEN).bitcast(U32) for n in rounded]
        stores = []
        for word in range(_GROUP // _BYTES):
            four = [n.alu(Ops.XOR, u32(_EVEN)) for n in integers[word * _BYTES :][:_BYTES]]
            for digit in range(DIGITS):
                parts = [shift(mask(shift_right(n, 8 * digit), 255), -8 * k) for k, n in enumerate(four)]
                place = ((digit * (_WORDS // 4) + (first + word) // 4) * units + unit) * 4 + word % 4
                stores.append(store(digits, place, bitwise_or(parts), ok))
        # A sum that is no number would be lost among integers.
        factor = total.ne(total).where(f32(math.nan), most * f32(1 / _MOST))
        return finish(f"digits_{cols}", [*stores, store(factors, item, factor, ok)])

    return Kernel(kernel, ("digits", "factors"), ("x",), LaunchHints(releases="after its wait"))


def row_sums(
    layout: WeightLayout, cols: int, digits: UOp, factors: UOp, planes: Sequence[UOp], rows: Sequence[UOp], t: UOp,
    threads: int, factor_of: Callable[[UOp, UOp | None], UOp] | None = None,
) -> list[UOp]:  # fmt: skip
    """The partial sums of rows, by thread t of `threads`. `factor_of`: as in `matvec`."""
    assert layout.format
    units, words = units_of(cols), _WORDS // 4
    steps = -(-units // threads)
    step = UOp.range(steps, 0, AxisType.REDUCE) if steps > 1 else None
    unit = t if step is None else t + step * threads
    inside = None if units == threads * steps else unit < units
    vector = [
        [load(digits, ((d * words + w // 4) * units + unit) * 4 + w % 4, inside) for w in range(_WORDS)]
        for d in range(DIGITS)
    ]
    groups = UNIT // _GROUP
    of_groups = [load(factors, unit * groups + g, inside) for g in range(groups)]
    if factor_of is not None:
        of_groups = [factor * factor_of(unit, inside) for factor in of_groups]
    signed = [(code - layout.format.code_offset) & 255 for code in layout.codes]
    products = []
    for row in rows:
        loaded, dots = layout.load_unit(planes, row, units, unit, inside), []
        codes = [code for word in loaded.words for code in code_words(word, signed, keeps=True)]
        for g in range(groups):
            own = range(g * _WORDS // groups, (g + 1) * _WORDS // groups)
            low, middle, high = (
                functools.reduce(lambda sum, w: _four(codes[w], vector[d][w], sum), own, UOp.const(0, I32))
                for d in range(DIGITS)
            )
            whole = high.cast(F32) * f32(2.0**16) + (middle * 256 + low).cast(F32)
            dots.append(whole * of_groups[g])
        products.append(loaded.scaled(dots, ()))
    return products if step is None else [p.reduce(step, arg=Ops.ADD) for p in products]


def _four(a: UOp, b: UOp, sum: UOp) -> UOp:
    """The sum, and the products of four bytes with a sign."""
    if is_cuda():
        return UOp(Ops.CUSTOM, I32, (a, b, sum), "__dp4a((int){0}, (int){1}, {2})")
    for k in range(_BYTES):
        x, y = (shift_right(word, 8 * k).cast(dtypes.int8).cast(I32) for word in (a, b))
        sum = sum + x * y
    return sum
