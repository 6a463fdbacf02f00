"""The layout of quantized matrices for GPU kernels, in which each thread reads 64 columns of a row.

A unit is 64 columns of a row: 2 * bits words of 32 bits, packed as in `bit_packing`. Word i of unit u lies at
[row, i // 4, u, i % 4], so that neighbouring threads load neighbouring 16 bytes. Words of floats lie at
[row, i // 8, u, i % 8]: a product of a prompt reads a quarter of a unit at a time, and memory gives 32 bytes. Separate
planes hold, for types that have them, one word for each unit with the bytes of its groups' scales and minima, and the
half-precision factors d and m. The word has 32 bits, or 16 if a unit has two scales (IQ4_XS). A byte holds a scale and
a minimum if these have 4 bits each (Q2_K). A unit of MXFP4 has a word of 16 bits with the exponents of its two blocks
in place of d.

Integers with a codebook stay indices of 4 bits in memory. Kernels compute with `Format.codes`, which are not negative,
as with the integers of other types; with MXFP4's and NVFP4's numbers as they are. Numbers that are all as far apart
need no codebook.

Matrices of floats have one plane: the words hold the values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from engine.formats.quantization import E2M1, FORMATS, Format
from engine.kernels.fields import FLOAT_TYPES, fields_of
from engine.targets.nvidia.kernels.uops import F32, chain, f32, load, mask, shift, shift_right, u32
from engine.targets.nvidia.kernels.weights.bit_packing import (
    CENTER,
    DENORMAL_EXPONENT,
    E2M1_EXPONENT,
    E2M1_HALF_EXPONENT,
    BitPacking,
    code_words,
    from_e2m1,
    in_memory,
    index_in_memory,
    pair_from_e2m1,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, matrix_bytes, units_of

FLOAT_RUN = 8  # words of floats that are neighbours
_CODE_BITS = 8
_MAX_BLOCK = 256  # columns of the largest quantization block
SMALL_FLOATS = 1  # the input_scale of small floats (`WeightLayout.input_scale_bits`)


@dataclass(frozen=True)
class WeightLayout:
    """The layout of matrices of a ggml type on the device, and how kernels read them."""

    ggml_type: int

    @property
    def format(self) -> Format | None:
        return FORMATS.get(self.ggml_type)

    @property
    def name(self) -> str:
        return self.format.name if self.format else str(FLOAT_TYPES[self.ggml_type].name)

    @functools.cached_property
    def bits(self) -> int:
        """Bits of an integer, or of a float."""
        return sum(self.format.bits) if self.format else FLOAT_TYPES[self.ggml_type].itemsize * 8

    @property
    def unit_words(self) -> int:
        """32-bit words in a unit."""
        return UNIT * self.bits // 32

    @property
    def _run(self) -> int:
        """Words of a unit that are neighbours."""
        return 4 if self.format else FLOAT_RUN

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.format.group if self.format else UNIT

    @property
    def input_scale_bits(self) -> int:
        """Identifies the input_scale that products with such a matrix want: the argument of `input_scale`."""
        if self.format is None:
            return 0
        return SMALL_FLOATS if self.is_e2m1 else self._unpacked_bits

    @property
    def has_codes(self) -> bool:
        """Whether indices stand for integers (`code_words`)."""
        return self.format is not None and bool(self.format.codebook) and not (self.is_e2m1 or self._step)

    @property
    def codes(self) -> Sequence[int]:
        """The codes of the indices in memory."""
        assert self.format
        return in_memory(self.format.codes)

    @functools.cached_property
    def _step(self) -> int:
        """The distance of the numbers of a codebook that are all as far apart: their indices do. Else 0."""
        steps = {b - a for a, b in itertools.pairwise(self.format.codebook)} if self.format else set()
        return steps.pop() if len(steps) == 1 else 0

    @property
    def _factor(self) -> float:
        """What d is to be multiplied by."""
        return self.format.factor * (self._step or 1) if self.format else 1.0

    @property
    def _unpacked_bits(self) -> int:
        """Bits of an integer, or of the code that it stands for."""
        return _CODE_BITS if self.has_codes else self.bits

    def _unpacked(self, words: Sequence[UOp]) -> tuple[BitPacking, list[UOp]]:
        """Words of integers, or of the codes that they stand for, and how these are packed."""
        if not self.has_codes:
            packing = BitPacking(self.bits)
            return packing, packing.joined(words)
        codes = [code for word in words for code in code_words(word, self.codes)]
        return BitPacking(_CODE_BITS), codes

    @property
    def scale(self) -> float:
        """The factor by which a product's sums must be multiplied, because fields are read as denormals."""
        if self.is_e2m1:
            return 2.0 ** (E2M1_EXPONENT - CENTER)
        return 2.0 ** (DENORMAL_EXPONENT - CENTER) if self.format else 1.0

    @property
    def is_e2m1(self) -> bool:
        """Whether indices are small floats (`from_e2m1`)."""
        return self.format is not None and self.format.codebook == E2M1

    @property
    def offset(self) -> float:
        """What a kernel subtracts from an integer, or from its code."""
        if self.format is None or self.is_e2m1:
            return 0
        if self._step:
            return self.format.code_offset / self._step
        return self.format.code_offset if self.format.codebook else self.format.offset

    @property
    def _small_bytes(self) -> int:
        """Bytes of a unit's scales and minima."""
        assert self.format
        has_both = "minimum" in self.format.scales and not self.format.has_nibble_scales
        return UNIT // self.group * (2 if has_both else 1)

    def shapes(self, rows: int, cols: int) -> list[tuple[int, DType]]:
        """(elements, type) of each plane of a matrix."""
        units = rows * units_of(cols)
        planes: list[tuple[int, DType]] = [(units * self.unit_words, dtypes.uint32)]
        if self.format is not None:
            if "scale" in self.format.scales:
                planes.append((units, dtypes.uint32 if self._small_bytes == 4 else dtypes.uint16))
            if self.format.exponent:
                planes.append((units, dtypes.uint16))
            else:
                planes.append((units * UNIT // self._halves_span * self._halves, dtypes.float16))
        return planes

    def n_bytes(self, rows: int, cols: int) -> int:
        return matrix_bytes(self.ggml_type, rows, cols)

    def planes_of(self, raw: Tensor, rows: int, cols: int) -> list[Tensor]:
        """The planes of a matrix, from its bytes as the file holds them, uint8 (bytes,). Lazy."""
        padded = units_of(cols) * UNIT
        if self.format is None:
            values = (
                raw.bitcast(FLOAT_TYPES[self.ggml_type]).reshape(rows, cols).pad(((0, 0), (0, padded - cols)))
            )
            return [self._planar(values.contiguous().bitcast(dtypes.uint32), rows).contiguous()]
        fields = fields_of(self.format, raw.reshape(-1, self.format.block_bytes))

        def padded_rows(values: Tensor, span: int) -> Tensor:
            return values.reshape(rows, cols // span).pad(((0, 0), (0, (padded - cols) // span)))

        packing = BitPacking(self.bits)
        q = padded_rows(fields.q, 1)
        if self.has_codes:
            q = index_in_memory(q, self.format.codes)
        q = q.contiguous()
        planes = [self._planar(packing.pack(q.reshape(-1, packing.period)), rows)]
        if fields.scale is not None:
            small_scales = [padded_rows(fields.scale.bitcast(dtypes.uint8), self.group)]
            if fields.minimum is not None:
                minimum = padded_rows(fields.minimum, self.group)
                if self.format.has_nibble_scales:
                    small_scales = [small_scales[0] | (minimum << 4)]
                else:
                    small_scales.append(minimum)
            joined = Tensor.cat(*(s.reshape(rows, -1, UNIT // self.group) for s in small_scales), dim=2)
            joined = joined.contiguous()
            planes.append(joined.bitcast(dtypes.uint32 if self._small_bytes == 4 else dtypes.uint16))
        block = self.format.block
        halves = [padded_rows(x, block) for x in (fields.d, fields.m) if x is not None]
        factors = Tensor.cat(*(h.reshape(rows, -1, self._halves_span // block) for h in halves), dim=2)
        planes.append(factors.contiguous().bitcast(dtypes.uint16) if self.format.exponent else factors)
        return [plane.flatten().contiguous() for plane in planes]

    @property
    def _halves_span(self) -> int:
        """Columns of the d (and m) that a kernel loads for a unit."""
        assert self.format
        return max(self.format.block, UNIT)

    @property
    def _halves(self) -> int:
        """Half-precision numbers for as many columns: d of each block, then m of each block."""
        assert self.format
        return self._halves_span // self.format.block * (2 if "m" in self.format.scales else 1)

    def _planar(self, words: Tensor, rows: int) -> Tensor:
        """uint32 words in the order of columns -> [row, i // 4, unit, i % 4], for floats with 8 in place of 4. If the
        words of a unit are no multiple of four, the last group of words is narrower."""
        words, n = words.reshape(rows, -1, self.unit_words), self._run
        parts = [words[:, :, i : i + n].reshape(rows, -1) for i in range(0, self.unit_words, n)]
        return parts[0].cat(*parts[1:], dim=1).flatten()

    # --- in kernels ------------------------------------------------------------------------------------

    def word_index(self, row: UOp, units: int, unit: UOp, i: int | UOp) -> UOp:
        """The index of word i of a unit, which lies in the last group of words for all its values or for none.
        `units`: units in a row."""
        n = self._run
        width = self.unit_words % n or n  # of the last group of words
        last = self.unit_words // n
        if width == n or (i if isinstance(i, int) else i.vmax) < last * n:
            return row * (units * self.unit_words) + i // n * (units * n) + unit * n + i % n
        assert isinstance(i, int) or i.vmin >= last * n
        return row * (units * self.unit_words) + last * (units * n) + unit * width + i % n

    def rows_of_active(self, rows: Sequence[UOp], units: int, active: UOp) -> Sequence[UOp]:
        """`rows`, which in blocks that are not `active` lie outside the matrix, and are 0 there if d is the same for
        all `units` of a row: it is loaded before a loop over units that has no steps, and multiplies its sum of 0."""
        return [active.where(row, 0) for row in rows] if units <= _MAX_BLOCK // UNIT else rows

    def load_unit(self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, valid: UOp | None) -> Unit:
        """Loads a unit of a row to registers."""
        return self.unit_of(self.load_words(planes, row, units, unit, valid))

    def load_words(
        self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, valid: UOp | None = None
    ) -> list[UOp]:
        """Loads a unit of a row: words, and what `_load_scales` loads."""
        words = [load(planes[0], self.word_index(row, units, unit, i), valid) for i in range(self.unit_words)]
        return words + self._load_scales(planes, row, units, unit, valid)

    def unit_of(self, loaded: Sequence[UOp]) -> Unit:
        """A unit that was loaded."""
        n = self.unit_words
        return Unit(self, list(loaded[:n]), *self._scales(loaded[n:]))

    def _load_scales(
        self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, valid: UOp | None = None
    ) -> list[UOp]:
        """What a unit has beside its integers: its small scales, if the type has them, as uint32; then d and m of its
        blocks, float16, or its exponents, uint32."""
        if self.format is None:
            return []
        place = row * units + unit
        small = [load(plane, place, valid).cast(dtypes.uint32) for plane in planes[1:-1]]
        if self.format.exponent:
            return [*small, load(planes[-1], place, valid).cast(dtypes.uint32)]
        units_a_load = self._halves_span // UNIT
        place = row * (units // units_a_load) + (unit // units_a_load if units_a_load > 1 else unit)
        return small + [load(planes[-1], place * self._halves + i, valid) for i in range(self._halves)]

    def _scales(self, loaded: Sequence[UOp]) -> tuple[UOp | None, list[UOp]]:
        """The word with a unit's small scales, if the type has them, and d and m of its blocks as float32."""
        if self.format is None:
            return None, []
        small, halves = (loaded[0], loaded[1:]) if "scale" in self.format.scales else (None, loaded)
        if self.format.exponent:
            numbers = [mask(shift(halves[0], -bits), 255 << 23).bitcast(F32) for bits in (23, 15)]
        else:
            numbers = [half.cast(F32) for half in halves]
        return small, numbers if self._factor == 1 else [number * f32(self._factor) for number in numbers]

    def load_quarter(self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, part: UOp) -> list[UOp]:
        """Loads columns 16 * part to 16 * part + 15 of a unit: words, and what `_load_scales` loads. `part` is a value
        of the kernel."""
        n = QUARTER * self.bits // 32
        words = [load(planes[0], self.word_index(row, units, unit, part * n + i)) for i in range(n)]
        if self.format and BitPacking(self.bits).has_halves:
            words.append(load(planes[0], self.word_index(row, units, unit, part // 2 + 4 * n)))
        return words + self._load_scales(planes, row, units, unit)

    def quarter(self, loaded: Sequence[UOp], part: UOp) -> list[UOp]:
        """The weights of a quarter that was loaded, float32."""
        if self.format is None:
            return [self.float_of(loaded, j) for j in range(QUARTER)]
        integers, d, m = self.integers(loaded, part)
        packing, words = self._unpacked(integers)
        n = packing.joined_words

        def fraction(j: int) -> UOp:
            k, j = divmod(j, packing.period)
            if self.is_e2m1:
                return from_e2m1(words[k], j)
            return packing.unpack_above_256(words[k * n : (k + 1) * n], j)

        values = [fraction(j) for j in range(QUARTER)]
        if self.is_e2m1:
            return [v * (d * f32(2.0**E2M1_HALF_EXPONENT)) for v in values]
        offset = d * f32(-256.0 - self.offset)  # values are 256 + q
        if m is not None:
            offset = offset - m
        return [v * d + offset for v in values]

    def integers(self, loaded: Sequence[UOp], part: UOp) -> tuple[list[UOp], UOp, UOp | None]:
        """Words that hold the integers of a quarter that was loaded where those of a unit hold its first ones, and the
        scale and the minimum of these columns as float32, of a type that is none of floats."""
        packing = BitPacking(self.bits)
        n = packing.quarter_words
        words, scales = list(loaded[:n]), loaded[n:]
        if packing.has_halves:
            half, *scales = scales
            # Words of the other quarters are not read.
            words += [shift_right(half, part % 2 * 16)] * (3 * n + 1)
        small_scales, halves = self._scales(scales)
        d, m = self._halves_of(halves, part)
        if small_scales is not None:
            group = part // (self.group // QUARTER) if self.group > QUARTER else part
            d = d * self._small_scale(small_scales, group, "scale")
            if m is not None:
                m = m * self._small_scale(small_scales, group, "minimum")
        return words, d, m

    def _halves_of(self, halves: list[UOp], part: UOp) -> tuple[UOp, UOp | None]:
        """d and m of the block that holds a quarter."""
        assert self.format
        blocks = self._halves_span // self.format.block
        d, m = halves[:blocks], halves[blocks:]
        if blocks == 2:  # of 32 columns each
            second = part >= 2
            d, m = [second.where(d[1], d[0])], [second.where(m[1], m[0])] if m else []
        return d[0], m[0] if m else None

    def _small_scale(self, word: UOp, group: int | UOp, name: str) -> UOp:
        """The scale or the minimum of a unit's group as a float32. Scales of types without minima are signed."""
        assert self.format
        if self.format.has_nibble_scales:
            return mask(shift_right(word, group * 8 + (4 if name == "minimum" else 0)), 15).cast(F32)
        i = group + UNIT // self.group if name == "minimum" else group
        signed = name == "scale" and "minimum" not in self.format.scales
        moved = shift_right(word, i * 8)
        return moved.cast(dtypes.int8).cast(F32) if signed else mask(moved, 255).cast(F32)

    def float_of(self, words: Sequence[UOp], j: int) -> UOp:
        """Float j of words that hold floats, as float32."""
        if self.bits == 32:
            return words[j].bitcast(F32)
        word = words[j // 2]
        if FLOAT_TYPES[self.ggml_type] == dtypes.bfloat16:
            bits = mask(word, 0xFFFF0000) if j % 2 else word.alu(Ops.SHL, u32(16))
            return bits.bitcast(F32)
        return shift_right(word, 16 * (j % 2)).cast(dtypes.uint16).bitcast(dtypes.float16).cast(F32)

    def group_sums(self, xs: Sequence[UOp]) -> list[UOp]:
        """Sums of the activations in each group of a unit, times 2**(CENTER - 149), from scaled activations. Empty
        if the type has neither an offset nor minima."""
        if self.format is None or not (self.offset or "m" in self.format.scales):
            return []
        n, p = self.group, positions_of(self.input_scale_bits)
        return [
            chain(xs[j] * f32(2.0 ** (p[j] - DENORMAL_EXPONENT)) for j in range(g, g + n))
            for g in range(0, UNIT, n)
        ]


@dataclass(frozen=True)
class Unit:
    """A unit of a row in registers: its words, the word of its small scales, and its halves (d, m) as float32."""

    layout: WeightLayout
    words: list[UOp]
    small_scales: UOp | None
    halves: list[UOp]

    def dot(self, xs: Sequence[UOp], sums: Sequence[UOp]) -> UOp:
        """The product with 64 scaled activations, still to be multiplied by `WeightLayout.scale`. `sums` are
        `WeightLayout.group_sums(xs)`."""
        layout, format = self.layout, self.layout.format
        if format is None:
            return chain(layout.float_of(self.words, j) * xs[j] for j in range(UNIT))
        (packing, words), n = layout._unpacked(self.words), layout.group
        small = [pair_from_e2m1(word, i) for word in words for i in range(4)] if layout.is_e2m1 else []
        dots = []
        for g in range(UNIT // n):
            terms = [sums[g] * f32(-layout.offset)] if layout.offset else []
            for j in range(g * n, (g + 1) * n):
                k, i = j // packing.period * packing.joined_words, j % packing.period
                if layout.is_e2m1:
                    field = small[k * 4 + i % 4][i // 4]
                else:
                    field = packing.unpack(words[k : k + packing.joined_words], i).bitcast(F32)
                terms.append(field * xs[j])
            dots.append(chain(terms))
        return self.scaled(dots, sums)

    def of_dots(self, dots: Sequence[UOp], sums: Sequence[UOp]) -> UOp:
        """The product, from those of the integers of each group, and the sums of the activations of each group if
        these have an offset."""
        if sums and (offset := self.layout.offset):
            dots = [dot + x * f32(-offset) for dot, x in zip(dots, sums, strict=True)]
        return self.scaled(dots, sums)

    def scaled(self, dots: Sequence[UOp], sums: Sequence[UOp]) -> UOp:
        """The product, from those of the integers less their offset, of each group."""
        layout, format = self.layout, self.layout.format
        assert format
        blocks = len(self.halves) // (2 if "m" in format.scales else 1)
        scaled, minima = [], []
        for g, dot in enumerate(dots):
            if self.small_scales is not None:
                dot = dot * layout._small_scale(self.small_scales, g, "scale")
            scaled.append(dot * self.halves[g] if blocks > 1 else dot)
            if "m" in format.scales:
                minimum = sums[g]
                if self.small_scales is not None:
                    minimum = minimum * layout._small_scale(self.small_scales, g, "minimum")
                minima.append(minimum * self.halves[blocks + g] if blocks > 1 else minimum)
        result = chain(scaled) if blocks > 1 else chain(scaled) * self.halves[0]
        if minima:
            result = result - (chain(minima) if blocks > 1 else chain(minima) * self.halves[1])
        return result

    def factors(self, group: int) -> tuple[UOp, UOp | None]:
        """The scale and the minimum of a group as float32: a weight is scale * (q - offset) - minimum."""
        layout, format = self.layout, self.layout.format
        assert format
        blocks = len(self.halves) // (2 if "m" in format.scales else 1)
        i = group if blocks > 1 else 0
        d, m = self.halves[i], self.halves[blocks + i] if "m" in format.scales else None
        if self.small_scales is not None:
            d = d * layout._small_scale(self.small_scales, group, "scale")
            m = None if m is None else m * layout._small_scale(self.small_scales, group, "minimum")
        return d, m

    def values(self) -> list[UOp]:
        """The weights of the unit's 64 columns, float32."""
        layout, format = self.layout, self.layout.format
        if format is None:
            return [layout.float_of(self.words, j) for j in range(UNIT)]
        (packing, words), n = layout._unpacked(self.words), layout.group
        values = []
        for g in range(UNIT // n):
            d, m = self.factors(g)
            offsets: dict[float, UOp] = {}
            for j in range(g * n, (g + 1) * n):
                k, place = j // packing.period * packing.joined_words, j % packing.period
                if layout.is_e2m1:
                    small = from_e2m1(words[k], place)
                    values.append(small * (d * f32(2.0**E2M1_HALF_EXPONENT)))
                    continue
                value, base = packing.unpack_above_base(words[k : k + packing.joined_words], place)
                if base not in offsets:
                    offset = d * f32(-base - layout.offset)
                    offsets[base] = offset if m is None else offset - m
                values.append(value * d + offsets[base])
        return values


@functools.cache
def input_scale(bits: int) -> NDArray[np.float32]:
    """float32 (UNIT,): the powers of two by which products want the activations of a unit multiplied. `bits`: see
    `WeightLayout.input_scale_bits`."""
    if not bits:
        return np.ones(UNIT, np.float32)
    return np.float32(2.0) ** (CENTER - np.asarray(positions_of(bits), np.float32))


def positions_of(input_scale_bits: int) -> list[int]:
    """The bit at which a product reads each integer of a unit."""
    if input_scale_bits == SMALL_FLOATS:
        return [0] * UNIT
    packing = BitPacking(input_scale_bits)
    return [packing.position(j) for j in range(UNIT)]


def permuted(column: UOp, cols: int) -> UOp:
    """The index at which a product expects the activation of a column: [quad of the unit, unit, column % 4], so that
    the 16-byte loads of a warp are adjacent."""
    units = units_of(cols)
    return (column % UNIT // 4 * units + column // UNIT) * 4 + column % 4


def permuted_size(cols: int) -> int:
    """Elements of a vector of permuted activations."""
    return units_of(cols) * UNIT
