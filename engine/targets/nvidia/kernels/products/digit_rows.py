"""Rows of a matrix with a codebook, or of small floats, times one vector, by instructions that multiply four bytes at a
time.

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
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

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
from engine.targets.nvidia.kernels.weights.bit_packing import CENTER, code_words
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import Unit, WeightLayout, positions_of

DIGITS = 3
GROUP, WORD_BYTES = 32, 4  # columns with a factor; bytes of a word
GROUP_WORDS = GROUP // WORD_BYTES
_WORDS = UNIT // WORD_BYTES  # of a unit, for each digit
_MOST = 127.0 * 2**16  # the largest integer of three such digits, but for those of the lower two
_THREADS = 32
_EVEN = 0x808080  # makes digits from 0 to 255, and an exclusive or with it makes them have signs again


def serves(layout: WeightLayout, cols: int) -> bool:
    """Whether there are such kernels for a matrix."""
    format = layout.format
    large = layout.has_codes and format is not None and len(format.codebook) > 8
    return (large or layout.is_e2m1) and layout.group == GROUP and cols % UNIT == 0


def sizes(cols: int) -> tuple[int, int]:
    """Words of a vector's digits, and its factors."""
    return DIGITS * _WORDS * units_of(cols), UNIT // GROUP * units_of(cols)


@functools.cache
def divide(layout: WeightLayout, cols: int, vectors: int = 1) -> Kernel:
    """Divides the vectors of a product. Buffers: digits, for each vector uint32 [digit, word // 4 of the unit, unit,
    word % 4]; factors, for each float32 [unit, group] (`sizes`); x, float32 (vectors, permuted_size(cols)), scaled for
    the layout."""

    def kernel(digits: UOp, factors: UOp, x: UOp) -> UOp:
        blocks = -(-sizes(cols)[1] // _THREADS)
        thread = UOp.special(blocks, "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
        vector = UOp.special(vectors, "gidx1") if vectors > 1 else UOp.const(0)
        stores = division(layout, cols, digits, factors, x, thread, blocks * _THREADS, vector)
        return finish(f"digits_{cols}" + f"_{vectors}" * (vectors > 1), stores)

    return Kernel(kernel, ("digits", "factors"), ("x",), LaunchHints(releases="after its wait"))


def division(
    layout: WeightLayout, cols: int, digits: UOp, factors: UOp, x: UOp, thread: UOp, threads: int,
    vector: UOp | None = None,
) -> list[UOp]:  # fmt: skip
    """The stores of `divide` by a thread, of so many `threads` of all blocks; of one of several vectors."""
    units, groups = units_of(cols), sizes(cols)[1]
    positions, vector = positions_of(layout.input_scale_bits), UOp.const(0) if vector is None else vector
    stores = []
    for first_group in range(0, groups, threads):
        group = thread + first_group
        ok = None if first_group + threads <= groups else group < groups
        unit, first = group // (UNIT // GROUP), group % (UNIT // GROUP) * GROUP_WORDS
        values = [
            load(
                x,
                vector * (units * UNIT) + ((first + j // WORD_BYTES) * units + unit) * 4 + j % WORD_BYTES,
                ok,
            )
            * f32(2.0 ** (positions[j % WORD_BYTES] - CENTER))
            for j in range(GROUP)
        ]
        divided = Divided.of(values)
        for word in range(GROUP_WORDS):
            four = values[word * WORD_BYTES :][:WORD_BYTES]
            stores += divided.store_word(digits, cols, vector, group, UOp.const(word), four, ok)
        stores.append(divided.store_factor(factors, cols, vector, group, ok))
    return stores


@dataclass(frozen=True)
class Divided:
    """A group of 32 columns of a vector whose digits are made: what its numbers are to be multiplied by, and the factor
    that undoes it."""

    inverse: UOp
    factor: UOp

    @classmethod
    def of(cls, numbers: Sequence[UOp]) -> Divided:
        most, total = maximum([v.maximum(v * f32(-1)) for v in numbers]), tree(numbers)
        inverse = (most > 0).where(f32(_MOST) * most.reciprocal(), f32(0))
        # A sum that is no number would be lost among integers.
        return cls(inverse, total.ne(total).where(f32(math.nan), most * f32(1 / _MOST)))

    def store_word(
        self, digits: UOp, cols: int, vector: UOp, group: UOp, word: UOp, four: Sequence[UOp], ok: UOp | None
    ) -> list[UOp]:
        """The stores of a word of each digit, of `four` numbers of a group, in one of several vectors of `cols`
        elements."""
        units, words = units_of(cols), sizes(cols)[0]
        unit, i = group // (UNIT // GROUP), group % (UNIT // GROUP) * GROUP_WORDS + word
        rounded = [(v * self.inverse + (v < 0).where(f32(-0.5), f32(0.5))).cast(I32) for v in four]
        with_signs = [(n + _EVEN).bitcast(U32).alu(Ops.XOR, u32(_EVEN)) for n in rounded]
        stores = []
        for digit in range(DIGITS):
            parts = [shift(mask(shift_right(n, 8 * digit), 255), -8 * k) for k, n in enumerate(with_signs)]
            place = ((digit * (_WORDS // 4) + i // 4) * units + unit) * 4 + i % 4
            stores.append(store(digits, place + vector * words, bitwise_or(parts), ok))
        return stores

    def store_factor(self, factors: UOp, cols: int, vector: UOp, group: UOp, ok: UOp | None) -> UOp:
        return store(factors, group + vector * sizes(cols)[1], self.factor, ok)


@dataclass(frozen=True)
class DigitUnit:
    """A unit of a vector in registers: the words of each digit, and the factors of its groups."""

    layout: WeightLayout
    words: list[list[UOp]]
    factors: list[UOp]

    @classmethod
    def load(
        cls, layout: WeightLayout, units: int, unit: UOp, inside: UOp | None, digits: UOp, factors: UOp,
        vector: UOp | None = None,
    ) -> DigitUnit:  # fmt: skip
        """Loads a unit, of `units`, of one of several vectors; zeros if it is not `inside`."""
        runs, groups = _WORDS // 4, UNIT // GROUP
        first_word, first = UOp.const(0), unit * groups
        if vector is not None:
            first_word, first = vector * (DIGITS * _WORDS * units), first + vector * (groups * units)
        words = [
            [
                load(digits, first_word + ((d * runs + w // 4) * units + unit) * 4 + w % 4, inside)
                for w in range(_WORDS)
            ]
            for d in range(DIGITS)
        ]
        return cls(layout, words, [load(factors, first + g, inside) for g in range(groups)])

    @functools.cached_property
    def _starts(self) -> list[list[UOp]]:
        """Of each group and digit, what the sum of products begins with, since codes that are small floats have an
        offset."""
        format, groups = self.layout.format, UNIT // GROUP
        assert format
        if not self.layout.is_e2m1:
            return [[UOp.const(0, I32)] * DIGITS] * groups
        offset, none = u32(0x1010101 * (-format.code_offset & 255)), UOp.const(0, I32)
        return [[self._sum([offset] * _WORDS, own, g, none) for own in self.words] for g in range(groups)]

    @staticmethod
    def _sum(codes: Sequence[UOp], own: Sequence[UOp], g: int, start: UOp) -> UOp:
        """`start` and the products of words of codes and of a digit's, of a group."""
        n = GROUP_WORDS
        return functools.reduce(lambda sum, w: _four(codes[w], own[w], sum), range(g * n, (g + 1) * n), start)

    def dot(self, loaded: Unit) -> UOp:
        """The product with a unit of a row."""
        format, dots = self.layout.format, []
        assert format
        # small floats are in memory in the order of their bits
        codes = (
            format.codes
            if self.layout.is_e2m1
            else [(c - format.code_offset) & 255 for c in self.layout.codes]
        )
        words = [four for word in loaded.words for four in code_words(word, codes, keeps=True)]
        for g, (starts, factor) in enumerate(zip(self._starts, self.factors, strict=True)):
            low, middle, high = (
                self._sum(words, own, g, start) for own, start in zip(self.words, starts, strict=True)
            )
            whole = high.cast(F32) * f32(2.0**16) + (middle * 256 + low).cast(F32)
            dots.append(whole * factor)
        return loaded.scaled(dots, ())


def vector_unit(
    layout: WeightLayout,
    x: Sequence[UOp],
    units: int,
    unit: UOp,
    inside: UOp | None,
    vector: UOp | None = None,
) -> Callable[[Unit], UOp]:
    """Loads a unit, of `units`, of a vector, or of one of several; zeros if it is not `inside`. Returns what gives its
    product with a unit of a row. `x`: the vector, or its digits and their factors."""
    if len(x) > 1:
        return DigitUnit.load(layout, units, unit, inside, x[0], x[1], vector).dot
    first = UOp.const(0) if vector is None else vector * (units * UNIT)
    xs = [load(x[0], first + (j // 4 * units + unit) * 4 + j % 4, inside) for j in range(UNIT)]
    group_sums = layout.group_sums(xs)
    return lambda loaded: loaded.dot(xs, group_sums)


def _four(a: UOp, b: UOp, sum: UOp) -> UOp:
    """The sum, and the products of four bytes with a sign."""
    if is_cuda():
        return UOp(Ops.CUSTOM, I32, (a, b, sum), "__dp4a((int){0}, (int){1}, {2})")
    for k in range(WORD_BYTES):
        x, y = (shift_right(word, 8 * k).cast(dtypes.int8).cast(I32) for word in (a, b))
        sum = sum + x * y
    return sum
