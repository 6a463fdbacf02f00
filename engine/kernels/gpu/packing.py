"""Quantized matrices as kernels of many threads read them: 32-bit words, 64 columns of a row to a thread.

Integers of b bits lie in words of 32, as many whole ones as fit; the bits left over at the top of a period's
words make up its last integers:

    bits  words  integers
       4      1         8 = 8 whole
       5      5        32 = 6 whole a word, 2 of spare bits
       6      3        16 = 5 whole a word, 1 of spare bits
       8      1         4 = 4 whole

A unit is 64 columns of a row: 2b words. Word i of unit u lies at [row, i // 4, u, i % 4], so that neighbouring
threads load neighbouring 16 bytes. Beside the words lie, for types that have them, one 32-bit word a unit with
the bytes of its groups' scales and minima, and the half-precision factors d and m.

Floats are the simple case: the words hold the values, and there is nothing beside them.

**Fields as denormals.** A field of width b at bit p of a word, p + b <= 24, masked and read as a float32, is
exactly q * 2**(p - 149). Whoever makes the activations multiplies them by 2**(CENTER - p), so that a product
takes one AND and one FMA, no shift and no conversion, and all sums carry one factor, 2**(CENTER - 149).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from engine.formats.quantization import FLOATS, QUANTIZED, Format
from engine.kernels.gpu.uops import F32, any_of, chain, f32, load, mask, shift, shift_right, u32

UNIT = 64
QUARTER = UNIT // 4
CENTER = 100
_DENORMAL = 149  # float32's smallest denormal is 2**-149
_MANTISSA = 24
_EIGHT_BITS = 15  # the lowest of the mantissa's upper eight
_ONE = 0x3F800000


@dataclass(frozen=True)
class Words:
    """How integers of `bits` bits lie in a period of 32-bit words."""

    bits: int

    @property
    def period(self) -> int:
        """Integers in a period."""
        return math.lcm(self.bits, 32) // self.bits

    @property
    def count(self) -> int:
        """Words in a period."""
        return math.lcm(self.bits, 32) // 32

    @property
    def whole(self) -> int:
        """Integers that lie whole in each word."""
        return 32 // self.bits

    def place(self, j: int) -> list[tuple[int, int, int, int]]:
        """Where integer j of a period lies: (word, lowest bit, bits, their lowest bit in the integer)."""
        if j < self.whole * self.count:
            return [(j // self.whole, j % self.whole * self.bits, self.bits, 0)]
        spare = 32 % self.bits
        first, pieces = (j - self.whole * self.count) * self.bits, []
        done = 0
        while done < self.bits:
            word, start = divmod(first + done, spare)
            n = min(spare - start, self.bits - done)
            pieces.append((word, 32 - spare + start, n, done))
            done += n
        return pieces

    def position(self, j: int) -> int:
        """The bit at which `field` leaves integer j."""
        (_, low, _, _), *rest = self.place(j % self.period)
        if rest:
            return 0
        return low if low + self.bits <= _MANTISSA else low - self._high

    @property
    def _high(self) -> int:
        """The lowest bit of the first integer that reaches beyond a float's mantissa: it and those above it
        are shifted down together."""
        return (_MANTISSA - self.bits) // self.bits * self.bits + self.bits

    def field(self, words: Sequence[UOp], j: int) -> UOp:
        """Integer j of the period held by `words`, shifted left by `position(j)`: uint32."""
        pieces = self.place(j)
        if len(pieces) == 1:
            word, low, n, _ = pieces[0]
            by = low - self.position(j)
            moved = shift_right(words[word], by)
            return (
                moved if by + n == 32 and not self.position(j) else mask(moved, ((1 << n) - 1) << (low - by))
            )
        parts = []
        for word, low, n, to in pieces:
            moved = shift_right(words[word], low - to)
            parts.append(moved if low - to + n == 32 and not to else mask(moved, ((1 << n) - 1) << to))
        return any_of(parts)

    def mantissa(self, words: Sequence[UOp], j: int) -> UOp:
        """1 + q / 256 as a float32, q being integer j of the period held by `words`: q lies in the upper bits of
        its mantissa, so that no conversion is needed."""
        parts = [
            mask(shift(words[word], low - to - _EIGHT_BITS), ((1 << n) - 1) << (to + _EIGHT_BITS))
            for word, low, n, to in self.place(j)
        ]
        return any_of([*parts, u32(_ONE)]).bitcast(F32)

    def pack(self, q: Tensor) -> Tensor:
        """uint8 (n, period) -> uint32 (n, count)."""
        q = q.cast(dtypes.uint32)
        words: list[Tensor | None] = [None] * self.count
        for j in range(self.period):
            for word, low, n, start in self.place(j):
                part = ((q[:, j] >> start) & ((1 << n) - 1)) << low
                before = words[word]
                words[word] = part if before is None else before | part
        return Tensor.stack(*[w for w in words if w is not None], dim=1)


@dataclass(frozen=True)
class Packing:
    """The form of a matrix type on the device, and what kernels do with a unit of it."""

    ggml_type: int

    @property
    def format(self) -> Format | None:
        return QUANTIZED.get(self.ggml_type)

    @property
    def name(self) -> str:
        return self.format.name if self.format else str(FLOATS[self.ggml_type].name)

    @functools.cached_property
    def bits(self) -> int:
        return sum(self.format.bits) if self.format else FLOATS[self.ggml_type].itemsize * 8

    @property
    def n_words(self) -> int:
        """32-bit words in a unit."""
        return UNIT * self.bits // 32

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.format.group if self.format else UNIT

    @property
    def scaling(self) -> int:
        """What products with it want activations multiplied by, in short: see `prescale`."""
        return self.bits if self.format else 0

    @property
    def scale(self) -> float:
        """What a product's sums are to be multiplied by."""
        return 2.0 ** (_DENORMAL - CENTER) if self.format else 1.0

    def shapes(self, rows: int, cols: int) -> list[tuple[int, DType]]:
        """(elements, dtype) of the planes of a matrix."""
        units = rows * units_of(cols)
        planes: list[tuple[int, DType]] = [(units * self.n_words, dtypes.uint32)]
        if self.format is not None:
            if "scale" in self.format.scales:
                planes.append((units, dtypes.uint32))
            planes.append((units * UNIT // self._halves_span * self._halves, dtypes.float16))
        return planes

    def n_bytes(self, rows: int, cols: int) -> int:
        return sum(n * dtype.itemsize for n, dtype in self.shapes(rows, cols))

    def planes_of(self, raw: Tensor, rows: int, cols: int) -> list[Tensor]:
        """A matrix's bytes as the file holds them, uint8 (bytes,) -> its planes."""
        padded = units_of(cols) * UNIT
        if self.format is None:
            values = raw.bitcast(FLOATS[self.ggml_type]).reshape(rows, cols).pad(((0, 0), (0, padded - cols)))
            return [self._planar(values.contiguous().bitcast(dtypes.uint32), rows).contiguous()]
        fields = self.format.fields(raw.reshape(-1, self.format.block_bytes))

        def padded_rows(values: Tensor, span: int) -> Tensor:
            return values.reshape(rows, cols // span).pad(((0, 0), (0, (padded - cols) // span)))

        words = Words(self.bits)
        q = padded_rows(fields.q, 1).contiguous()
        planes = [self._planar(words.pack(q.reshape(-1, words.period)), rows)]
        if fields.scale is not None:
            small = [padded_rows(fields.scale.bitcast(dtypes.uint8), self.group)]
            if fields.minimum is not None:
                small.append(padded_rows(fields.minimum, self.group))
            joined = Tensor.cat(*(s.reshape(rows, -1, UNIT // self.group) for s in small), dim=2)
            planes.append(joined.contiguous().bitcast(dtypes.uint32))
        block = self.format.block
        halves = [padded_rows(x, block) for x in (fields.d, fields.m) if x is not None]
        planes.append(Tensor.cat(*(h.reshape(rows, -1, self._halves_span // block) for h in halves), dim=2))
        return [plane.flatten().contiguous() for plane in planes]

    @property
    def _halves_span(self) -> int:
        """Columns that one load of d (and m) serves."""
        assert self.format
        return max(self.format.block, UNIT)

    @property
    def _halves(self) -> int:
        """Half-precision numbers in such a load: d of each block, then m of each."""
        assert self.format
        return self._halves_span // self.format.block * (2 if "m" in self.format.scales else 1)

    def _planar(self, words: Tensor, rows: int) -> Tensor:
        """uint32 words in the order of columns -> [row, i // 4, unit, i % 4]; a last plane of fewer than four
        words has its own width."""
        words = words.reshape(rows, -1, self.n_words)
        parts = [words[:, :, i : i + 4].reshape(rows, -1) for i in range(0, self.n_words, 4)]
        return parts[0].cat(*parts[1:], dim=1).flatten()

    # ---- in kernels ----

    def word_index(self, row: UOp, units: int, unit: UOp, i: int | UOp) -> UOp:
        """Where word i of a unit lies. `units`: units in a row."""
        width = self.n_words % 4 or 4  # of the last plane
        if width == 4 or (isinstance(i, int) and i < self.n_words // 4 * 4):
            return row * (units * self.n_words) + i // 4 * (units * 4) + unit * 4 + i % 4
        last = self.n_words // 4
        if isinstance(i, int):
            return row * (units * self.n_words) + last * (units * 4) + unit * width + i % 4
        whole = i < last * 4
        inside = whole.where(i // 4 * (units * 4) + unit * 4, last * (units * 4) + unit * width)
        return row * (units * self.n_words) + inside + i % 4

    def load_unit(self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, valid: UOp | None) -> Unit:
        """A unit of a row, in registers."""
        words = [load(planes[0], self.word_index(row, units, unit, i), valid) for i in range(self.n_words)]
        return Unit(self, words, *self._beside(planes, row, units, unit, valid))

    def _beside(
        self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, valid: UOp | None
    ) -> tuple[UOp | None, list[UOp]]:
        if self.format is None:
            return None, []
        small = load(planes[1], row * units + unit, valid) if "scale" in self.format.scales else None
        per = self._halves_span // UNIT
        place = row * (units // per) + (unit // per if per > 1 else unit)
        halves = [load(planes[-1], place * self._halves + i, valid).cast(F32) for i in range(self._halves)]
        return small, halves

    def quarter(self, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, part: UOp) -> list[UOp]:
        """The weights of columns 16 * part to 16 * part + 15 of a unit, float32; `part` is known when the
        kernel runs."""
        if self.format is None:
            n = QUARTER * self.bits // 32
            words = [load(planes[0], self.word_index(row, units, unit, part * n + i)) for i in range(n)]
            return [self.float_of(words, j) for j in range(QUARTER)]
        kind = Words(self.bits)
        periods = max(QUARTER // kind.period, 1)  # of 16 columns
        shared = max(kind.period // QUARTER, 1)  # quarters that share a period
        first = (part // shared if shared > 1 else part) * (periods * kind.count)
        words = [
            load(planes[0], self.word_index(row, units, unit, first + i)) for i in range(periods * kind.count)
        ]

        def integer(j: int) -> UOp:
            k, j = divmod(j, kind.period)
            return kind.mantissa(words[k * kind.count : (k + 1) * kind.count], j)

        values = [integer(j) for j in range(QUARTER)]
        for half in range(1, shared):
            here = (part % shared).eq(half)
            values = [here.where(integer(half * QUARTER + j), v) for j, v in enumerate(values)]
        small, halves = self._beside(planes, row, units, unit, None)
        d, m = self._halves_of(halves, part)
        if small is not None:
            group = part // (self.group // QUARTER) if self.group > QUARTER else part
            n = UNIT // self.group
            d = d * self._byte(small, group, "scale")
            if m is not None:
                m = m * self._byte(small, group + n, "minimum")
        offset = d * f32(-256.0 - self.format.offset)
        if m is not None:
            offset = offset - m
        return [v * (d * f32(256.0)) + offset for v in values]

    def _halves_of(self, halves: list[UOp], part: UOp) -> tuple[UOp, UOp | None]:
        """d and m of the block that holds a quarter."""
        assert self.format
        blocks = self._halves_span // self.format.block
        d, m = halves[:blocks], halves[blocks:]
        if blocks == 2:  # of 32 columns each
            second = part >= 2
            d, m = [second.where(d[1], d[0])], [second.where(m[1], m[0])] if m else []
        return d[0], m[0] if m else None

    def _byte(self, word: UOp, i: int | UOp, name: str) -> UOp:
        """Byte i of a word as a float: scales of Q6_K have a sign, the others none."""
        signed = name == "scale" and "minimum" not in (self.format.scales if self.format else ())
        moved = shift_right(word, i * 8)
        return moved.cast(dtypes.int8).cast(F32) if signed else mask(moved, 255).cast(F32)

    def float_of(self, words: Sequence[UOp], j: int) -> UOp:
        """Value j of words that hold floats."""
        if self.bits == 32:
            return words[j].bitcast(F32)
        word = words[j // 2]
        if FLOATS[self.ggml_type] == dtypes.bfloat16:
            bits = mask(word, 0xFFFF0000) if j % 2 else word.alu(Ops.SHL, u32(16))
            return bits.bitcast(F32)
        return shift_right(word, 16 * (j % 2)).cast(dtypes.uint16).bitcast(dtypes.float16).cast(F32)

    def group_sums(self, xs: Sequence[UOp]) -> list[UOp]:
        """Sums of prescaled activations over each group of a unit, times 2**(CENTER - 149); for formats that
        have an offset or minima."""
        if self.format is None or not (self.format.offset or "m" in self.format.scales):
            return []
        words, n = Words(self.bits), self.group
        p = [words.position(j) for j in range(UNIT)]
        return [
            chain(xs[j] * f32(2.0 ** (p[j] - _DENORMAL)) for j in range(g, g + n)) for g in range(0, UNIT, n)
        ]


@dataclass(frozen=True)
class Unit:
    """A unit of a row, in registers: its words, the bytes of its scales and its halves (d, m) as float32."""

    packing: Packing
    words: list[UOp]
    small: UOp | None
    halves: list[UOp]

    def dot(self, xs: Sequence[UOp], sums: Sequence[UOp]) -> UOp:
        """The product with 64 prescaled activations, to be multiplied by `Packing.scale`; `sums` are
        `Packing.group_sums(xs)`."""
        packing, format = self.packing, self.packing.format
        if format is None:
            return chain(packing.float_of(self.words, j) * xs[j] for j in range(UNIT))
        kind, n = Words(packing.bits), packing.group
        blocks = len(self.halves) // (2 if "m" in format.scales else 1)
        total, minus = [], []
        for g in range(UNIT // n):
            terms = [sums[g] * f32(-format.offset)] if format.offset else []
            for j in range(g * n, (g + 1) * n):
                k = j // kind.period * kind.count
                field = kind.field(self.words[k : k + kind.count], j % kind.period)
                terms.append(field.bitcast(F32) * xs[j])
            dot = chain(terms)
            if self.small is not None:
                dot = dot * packing._byte(self.small, g, "scale")
            total.append(dot * self.halves[g] if blocks > 1 else dot)
            if "m" in format.scales:
                least = sums[g]
                if self.small is not None:
                    least = least * packing._byte(self.small, g + UNIT // n, "minimum")
                minus.append(least * self.halves[blocks + g] if blocks > 1 else least)
        result = chain(total) if blocks > 1 else chain(total) * self.halves[0]
        if minus:
            result = result - (chain(minus) if blocks > 1 else chain(minus) * self.halves[1])
        return result


@functools.cache
def prescale(scaling: int) -> NDArray[np.float32]:
    """float32 (UNIT,): what products want the activations of a unit multiplied by: powers of two, so exactly.
    `scaling` is the bits of their integers, 0 for floats."""
    if not scaling:
        return np.ones(UNIT, np.float32)
    positions = [Words(scaling).position(j) for j in range(UNIT)]
    return np.float32(2.0) ** (CENTER - np.asarray(positions, np.float32))


def units_of(cols: int) -> int:
    """Units in a row of `cols` columns."""
    return -(-cols // UNIT)


def permuted(column: UOp, cols: int) -> UOp:
    """Where a product wants the activation of a column: [quad of the unit, unit, column % 4], so that a warp's
    loads of 16 bytes lie side by side."""
    units = units_of(cols)
    return (column % UNIT // 4 * units + column // UNIT) * 4 + column % 4


def permuted_size(cols: int) -> int:
    return units_of(cols) * UNIT
