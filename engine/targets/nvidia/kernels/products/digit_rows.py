"""Rows of a matrix with a codebook, of integers of 4 or 6 bits, or of small floats, times one vector, by instructions
that multiply four bytes at a time.

Codes are looked up four at a time, as bytes of a word, and so integers are masked. Each of them would be masked by
itself before float32 could multiply it, and such instructions are what bounds these products. An instruction that adds
four products of bytes takes the word as it is. So the vector becomes integers of two or three digits, bytes with a sign
(`Form`): a kernel before the product divides it, in groups of columns, whose largest number gives the factor. Sums are
whole numbers. With three digits the rest is below 2**-23 of that factor, and the result as exact as with float32. With
two it is below 2**-15, a sixteenth of what float16 leaves, which prompts have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    chain,
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
from engine.targets.nvidia.kernels.weights.weight_layout import Unit, WeightLayout, positions_of

WORD_BYTES = 4
_WORDS = UNIT // WORD_BYTES  # of a unit, for each digit
_THREADS = 32
_EVEN = 0x808080  # makes digits from 0 to 255, and an exclusive or with it makes them have signs again
_FLOAT, _FLOAT_BITS = 1.5 * 2**23, 0x4B400000  # and its bits, to which whole numbers below 2**22 may be added


class Form(NamedTuple):
    """How a vector is divided: the number of digits, the columns of a group, its largest integer, and whether the group
    has its sum too. `integer_bits`: of integers that are multiplied as they are in memory; 0 for none."""

    digits: int
    group: int
    most: int
    has_sums: bool
    integer_bits: int = 0

    @property
    def group_words(self) -> int:
        return self.group // WORD_BYTES

    def groups(self, cols: int) -> int:
        return UNIT // self.group * units_of(cols)

    def sizes(self, cols: int) -> tuple[int, int]:
        """Words of a vector's digits, and the number of its factors and sums."""
        return self.digits * _WORDS * units_of(cols), self.groups(cols) * (2 if self.has_sums else 1)

    def columns(self, word: int | UOp) -> list[int | UOp]:
        """The columns of a group whose digits are the bytes of one of its words. Integers are masked in a word, so that
        those of every other column remain."""
        if not self.integer_bits:
            return [word * WORD_BYTES + k for k in range(WORD_BYTES)]
        return [word // 2 * (2 * WORD_BYTES) + word % 2 + 2 * k for k in range(WORD_BYTES)]


_OF_CODES = Form(3, 32, 127 << 16, False)
_OF_INTEGERS = {
    4: Form(2, 16, 66 << 8, True, 4),  # sums of 16 products are below 2**22
    6: Form(2, 8, 127 << 8, True, 6),
}


def form_of(input_scale_bits: int) -> Form:
    """The form for layouts with such input_scales."""
    return _OF_INTEGERS.get(input_scale_bits, _OF_CODES)


def serves(layout: WeightLayout, cols: int) -> bool:
    """Whether there are such kernels for a matrix."""
    format = layout.format
    large = layout.has_codes and format is not None and len(format.codebook) > 8
    is_known = large or layout.is_e2m1 or has_integers(layout)
    is_scaled = layout.group % form_of(layout.input_scale_bits).group == 0
    return is_known and is_scaled and cols % UNIT == 0


def has_integers(layout: WeightLayout) -> bool:
    """Whether a matrix has integers of 4 or 6 bits that are multiplied as they are in memory."""
    return bool(form_of(layout.input_scale_bits).integer_bits)


@functools.cache
def divide(layout: WeightLayout, cols: int, vectors: int = 1) -> Kernel:
    """Divides the vectors of a product. Buffers: digits, for each vector uint32 [digit, word // 4 of the unit, unit,
    word % 4]; factors, for each float32 [unit, group], then the sums of groups likewise if the form has them
    (`Form.sizes`); x, float32 (vectors, permuted_size(cols)), scaled for the layout."""

    def kernel(digits: UOp, factors: UOp, x: UOp) -> UOp:
        blocks = -(-form_of(layout.input_scale_bits).groups(cols) // _THREADS)
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
    form = form_of(layout.input_scale_bits)
    units, groups, each = units_of(cols), form.groups(cols), UNIT // form.group
    positions, vector = positions_of(layout.input_scale_bits), UOp.const(0) if vector is None else vector
    stores = []
    for first_group in range(0, groups, threads):
        group = thread + first_group
        ok = None if first_group + threads <= groups else group < groups
        unit, first = group // each, group % each * form.group_words
        values = [
            load(
                x,
                vector * (units * UNIT) + ((first + j // WORD_BYTES) * units + unit) * 4 + j % WORD_BYTES,
                ok,
            )
            * f32(2.0 ** (positions[j] - CENTER))
            for j in range(form.group)
        ]
        divided = Divided.of(form, values)
        for word in range(form.group_words):
            four = [values[int(column)] for column in form.columns(word)]
            stores += divided.store_word(digits, cols, vector, group, UOp.const(word), four, ok)
        stores += divided.store_factor(factors, cols, vector, group, ok)
    return stores


@dataclass(frozen=True)
class Divided:
    """A group of columns of a vector whose digits are made: what its numbers are to be multiplied by, the factor that
    undoes it, and their sum."""

    form: Form
    inverse: UOp
    factor: UOp
    total: UOp

    @classmethod
    def of(cls, form: Form, numbers: Sequence[UOp]) -> Divided:
        most, total = maximum([v.maximum(v * f32(-1)) for v in numbers]), tree(numbers)
        inverse = (most > 0).where(f32(form.most) * most.reciprocal(), f32(0))
        # A sum that is no number would be lost among integers.
        return cls(form, inverse, total.ne(total).where(f32(math.nan), most * f32(1 / form.most)), total)

    def store_word(
        self, digits: UOp, cols: int, vector: UOp, group: UOp, word: UOp, four: Sequence[UOp], ok: UOp | None
    ) -> list[UOp]:
        """The stores of a word of each digit, of `four` numbers of a group, in one of several vectors of `cols`
        elements."""
        units, (words, _), each = units_of(cols), self.form.sizes(cols), UNIT // self.form.group
        unit, i = group // each, group % each * self.form.group_words + word
        rounded = [(v * self.inverse + (v < 0).where(f32(-0.5), f32(0.5))).cast(I32) for v in four]
        with_signs = [(n + _EVEN).bitcast(U32).alu(Ops.XOR, u32(_EVEN)) for n in rounded]
        stores = []
        for digit in range(self.form.digits):
            parts = [shift(mask(shift_right(n, 8 * digit), 255), -8 * k) for k, n in enumerate(with_signs)]
            place = ((digit * (_WORDS // 4) + i // 4) * units + unit) * 4 + i % 4
            stores.append(store(digits, place + vector * words, bitwise_or(parts), ok))
        return stores

    def store_factor(self, factors: UOp, cols: int, vector: UOp, group: UOp, ok: UOp | None) -> list[UOp]:
        """The stores of the factor, and of the sum."""
        place = group + vector * self.form.sizes(cols)[1]
        stores = [store(factors, place, self.factor, ok)]
        return stores + [store(factors, place + self.form.groups(cols), self.total, ok)] * self.form.has_sums


@dataclass(frozen=True)
class DigitUnit:
    """A unit of a vector in registers: the words of each digit, the factors of its groups, and if rows have minima or
    an offset, sums of as many columns as share a scale."""

    layout: WeightLayout
    words: list[list[UOp]]
    factors: list[UOp]
    sums: list[UOp]

    @classmethod
    def load(
        cls, layout: WeightLayout, units: int, unit: UOp, inside: UOp | None, digits: UOp, factors: UOp,
        vector: UOp | None = None,
    ) -> DigitUnit:  # fmt: skip
        """Loads a unit, of `units`, of one of several vectors; zeros if it is not `inside`."""
        form = form_of(layout.input_scale_bits)
        runs, groups = _WORDS // 4, UNIT // form.group
        first_word, first = UOp.const(0), unit * groups
        if vector is not None:
            n_words, n_factors = form.sizes(units * UNIT)
            first_word, first = vector * n_words, first + vector * n_factors
        words = [
            [
                load(digits, first_word + ((d * runs + w // 4) * units + unit) * 4 + w % 4, inside)
                for w in range(_WORDS)
            ]
            for d in range(form.digits)
        ]
        scales, sums = layout.format.scales if layout.format else (), list[UOp]()
        if form.has_sums and (layout.offset or "m" in scales):
            of_groups = [load(factors, first + groups * units + g, inside) for g in range(groups)]
            each = layout.group // form.group
            sums = [tree(of_groups[i : i + each]) for i in range(0, groups, each)]
        return cls(layout, words, [load(factors, first + g, inside) for g in range(groups)], sums)

    @functools.cached_property
    def _starts(self) -> list[list[UOp]]:
        """What the sum of products begins with, for each group and digit: codes that are small floats have an
        offset."""
        format, none = self.layout.format, UOp.const(0, I32)
        assert format
        if self._form.has_sums:  # the lower digit's sum, and with it that of both, may become a float
            return [[UOp.const(_FLOAT_BITS, I32) if self._are_small else none, none]] * len(self.factors)
        if not self.layout.is_e2m1:
            return [[none] * self._form.digits] * len(self.factors)
        offset = u32(0x1010101 * (-format.code_offset & 255))
        return [
            [self._sum([offset] * _WORDS, own, g, none) for own in self.words]
            for g in range(len(self.factors))
        ]

    @property
    def _form(self) -> Form:
        return form_of(self.layout.input_scale_bits)

    @property
    def _are_small(self) -> bool:
        """Whether sums are below 2**22, so that they need no conversion."""
        return self._form.integer_bits == 4

    def _sum(self, codes: Sequence[UOp], own: Sequence[UOp], g: int, start: UOp) -> UOp:
        """`start` and the products of words of codes and of a digit's, of a group."""
        n = self._form.group_words
        return functools.reduce(lambda sum, w: _four(codes[w], own[w], sum), range(g * n, (g + 1) * n), start)

    def dot(self, loaded: Unit) -> UOp:
        """The product with a unit of a row."""
        sums = self._sums_of_integers(loaded) if self._form.has_sums else self._sums_of_codes(loaded)
        products = [a * b for a, b in zip(sums, self.factors, strict=True)]
        each = self.layout.group // self._form.group
        dots = [chain(products[i : i + each]) for i in range(0, len(products), each)]
        return loaded.of_dots(dots, self.sums)

    def _sums_of_integers(self, loaded: Unit) -> list[UOp]:
        """The sum of each group, of weights that are integers."""
        words = [mask(shift_right(word, by), 0x0F0F0F0F) for word in loaded.words for by in (0, 4)]
        if self._form.integer_bits == 6:
            words = BitPacking(6).joined(loaded.words, apart=True)
        sums = []
        for g, starts in enumerate(self._starts):
            low, high = (self._sum(words, own, g, s) for own, s in zip(self.words, starts, strict=True))
            both = high * 256 + low
            sums.append(both.bitcast(F32) - f32(_FLOAT) if self._are_small else both.cast(F32))
        return sums

    def _sums_of_codes(self, loaded: Unit) -> list[UOp]:
        """The sum of each group, of weights that are places in a codebook, or small floats."""
        format, sums = self.layout.format, []
        assert format
        # small floats are in memory in the order of their bits
        codes = (
            format.codes
            if self.layout.is_e2m1
            else [(c - format.code_offset) & 255 for c in self.layout.codes]
        )
        words = [four for word in loaded.words for four in code_words(word, codes, keeps=True)]
        for g, starts in enumerate(self._starts):
            low, middle, high = (
                self._sum(words, own, g, s) for own, s in zip(self.words, starts, strict=True)
            )
            sums.append(high.cast(F32) * f32(2.0**16) + (middle * 256 + low).cast(F32))
        return sums


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
