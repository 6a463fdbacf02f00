"""How a CPU holds quantized matrices: streams of 16-bit words with `lanes` rows side by side, and how kernels read
them.

A vector is 2 * lanes words, two for each row. The bit planes of a type (see `Format.bits`) are stored for 32 columns at
a time. A plane of b bits takes b vectors. In vector i the two words of a row hold the columns

    32 / b * i + 2 * f      in bits b * f to b * f + b - 1 of the first word,
    32 / b * i + 2 * f + 1  in the same bits of the second word.

So one shift and one mask give the integers of two neighbouring columns, for all rows, as 16-bit pairs. That is the
operand of a multiply-add of pairs (`KernelBuilder.multiply_pair`).

Weights of 6 bits (Q6_K) are one plane. Three vectors hold 8 pairs of columns: two pairs in the lower 12 bits of each
vector, as above. The last two pairs are split: their lower 4 bits are the upper 4 bits of the first and of the second
vector; their upper 2 bits lie in the upper 4 bits of the third.

The stream of `lanes` rows is a sequence of blocks:

    d, m (lanes float16 each; m only if the type has minima; for an exponent the upper half of a float32)
    for each 32 columns: lanes words of small scales (only if the type has them), then the vectors of each plane

A word of small scales holds the scale and the minimum (Q4_K, Q5_K), the scales of the first and of the last 16
columns (Q3_K, Q6_K; for Q2_K with their minima, 4 bits each), or one scale (IQ4_XS). Bytes per weight are the file's;
Q3_K, Q4_K and Q5_K take 4 bytes more a block of 256, 3.6 %, 2.8 % and 2.3 %; IQ4_XS 10 more, 7.4 %; MXFP4 one more a
block of 32, 5.9 %. A float matrix is a stream of `lanes` values for each column.

Integers with a codebook stay indices of 4 bits in memory, of its numbers in ascending order (`LaneLayout.codebook`).
x86 looks them up. Elsewhere they are the values of a line with few bends, which is quick to compute
(`piecewise_linear`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from engine.kernels.fields import FLOAT_TYPES
from engine.targets.cpu.kernels.kernel_builder import (
    F16,
    F32,
    I8,
    I16,
    U8,
    U16,
    Index,
    KernelBuilder,
    shift_left,
    shift_right,
)
from engine.targets.cpu.kernels.lanes import looks_up
from engine.targets.cpu.kernels.stream_size import UNIT, StreamSize

PAIRS = UNIT // 2  # of columns in a unit


@dataclass(frozen=True)
class LaneLayout(StreamSize):
    """The layout of matrices of a ggml type, for vectors of `lanes` rows."""

    @property
    def dtype(self) -> DType:
        """The type of the stream's elements."""
        return U16 if self.format else FLOAT_TYPES[self.ggml_type]

    @property
    def name(self) -> str:
        return self.format.name if self.format else self.dtype.name

    @property
    def planes(self) -> tuple[int, ...]:
        """The bits of each plane as stored, the lowest bits of a weight first."""
        assert self.format
        return (6,) if self.format.bits == (4, 2) else self.format.bits

    @property
    def codebook(self) -> tuple[int, ...]:
        """The numbers that the stored indices stand for; empty if the type has none."""
        return tuple(sorted(set(self.format.codebook))) if self.format else ()

    def stored(self, q: UOp) -> UOp:
        """The integers that are stored for a file's, uint16."""
        if self.format is None or not self.format.codebook:
            return q
        return piecewise_linear(q.cast(I16), [self.codebook.index(n) for n in self.format.codebook]).cast(U16)

    # --- reading ---------------------------------------------------------------------------------------

    def half(self, k: KernelBuilder, stream: UOp, at: UOp) -> UOp:
        """`lanes` float16 numbers of the stream, as float32."""
        return self._as_factor(k.vector(stream, at))

    def _as_factor(self, words: UOp) -> UOp:
        """d, times the type's factor, or m, as float32: a type with a factor has no minima."""
        format = self.format
        if format and format.exponent:
            number = shift_left(words.cast(dtypes.uint32), 16).bitcast(F32)
        else:
            number = words.bitcast(F16).cast(F32)
        return number * format.factor if format and format.factor != 1 else number

    def scales(
        self, k: KernelBuilder, stream: UOp, block: UOp, unit: UOp, run: Index | None
    ) -> tuple[UOp, UOp | None]:
        """The scale and the minimum, float32 (lanes,) each, of a run of columns: w = scale * q - minimum. `block` and
        `unit` are indices in the stream. The scale includes the small scale of the run (see `small_scale`), unless
        `run` is None."""
        assert self.format
        scale = self.half(k, stream, block)
        if self.has_small_scales and run is not None:
            scale = scale * self.small_scale(k, stream, unit, run).cast(F32)
        has_one = "m" in self.format.scales and (run is not None or not self.format.has_nibble_scales)
        return scale, self.minimum(k, stream, block, unit, 0 if run is None else run) if has_one else None

    def minimum(self, k: KernelBuilder, stream: UOp, block: UOp, unit: UOp, run: Index) -> UOp:
        """The minimum of a run of columns, float32 (lanes,); all runs of a unit have the same, but for Q2_K."""
        minimum = self.half(k, stream, block + self.lanes)
        if not self.has_small_scales:
            return minimum
        if self.format and self.format.has_nibble_scales:
            return minimum * (shift_right(k.vector(stream, unit), run * 8 + 4) & 15).cast(I16).cast(F32)
        return minimum * self.small_scale(k, stream, unit, 1).cast(F32)

    def small_scale(self, k: KernelBuilder, stream: UOp, unit: UOp, n: Index) -> UOp:
        """The first (n = 0) or second (n = 1) small scale of a unit, int16 (lanes,): the scale and the minimum, or the
        scales of the first and of the second run of 16 columns."""
        words = k.vector(stream, unit)
        if self.format and "minimum" in self.format.scales:
            return (shift_right(words, n * 8) & (15 if self.format.has_nibble_scales else 255)).cast(I16)
        return shift_right(shift_left(words.bitcast(I16), 8 - n * 8), 8)

    def pairs(self, k: KernelBuilder, stream: UOp, unit: UOp, start: Index, n: int) -> list[UOp]:
        """The integers of the pairs of columns `start` to `start + n - 1` of a unit, int16 (2 * lanes,) each, decoded
        if the type has a codebook. `start` and `n` are multiples of `pairs_together`."""
        assert self.format
        values: list[UOp | None] = [None] * n
        at, low = unit + self.lanes * self.has_small_scales, 0
        if self.planes == (6,):
            return self._pairs_of_six(k, stream, at, start, n)
        for bits in self.planes:
            fields = 16 // bits
            for i in range(ceil(n / fields)):
                vector = k.vector(stream, at + (start // fields + i) * (2 * self.lanes), 2 * self.lanes)
                for f in range(min(fields, n - i * fields)):
                    field: Index = f * bits if n >= fields else (start % fields + f) * bits
                    value = shift_right(vector, field)
                    if not (isinstance(field, int) and field + bits == 16):
                        value = value & (2**bits - 1)
                    lower = values[i * fields + f]
                    values[i * fields + f] = value if lower is None else lower | shift_left(value, low)
            at, low = at + self.lanes * 2 * bits, low + bits
        integers = [v.cast(I16) for v in values if v is not None]
        return [self._decoded(k, v) for v in integers] if self.codebook else integers

    def _decoded(self, k: KernelBuilder, indices: UOp) -> UOp:
        return k.look_up(self.codebook, indices) if looks_up() else piecewise_linear(indices, self.codebook)

    def _pairs_of_six(self, k: KernelBuilder, stream: UOp, at: UOp, start: Index, n: int) -> list[UOp]:
        values = []
        for i in range(n // 8):
            a, b, c = (
                k.vector(stream, at + ((start // 8 + i) * 3 + j) * (2 * self.lanes), 2 * self.lanes)
                for j in range(3)
            )
            values += [field & 63 for v in (a, b, c) for field in (v, shift_right(v, 6))]
            values += [shift_right(v, 12) | (shift_right(c, bit) & 48) for v, bit in ((a, 8), (b, 10))]
        return [v.cast(I16) for v in values]

    @property
    def pairs_together(self) -> int:
        """The number of pairs that the same vectors hold. Planes of 1 bit do not count: they are shifted to the
        pair."""
        assert self.format
        if self.planes == (6,):
            return 8
        return max(16 // bits for bits in self.format.bits if bits > 1)

    def columns(
        self, k: KernelBuilder, stream: UOp, group: UOp, blocks: Index, unit: UOp, lane: UOp
    ) -> list[UOp]:
        """The weights of one row in a unit, or in one column of a float matrix, float32 scalars. The row is `lane` of
        `group`, and has `blocks` blocks."""
        if self.format is None:
            return [as_float(k.load(stream, (group * blocks + unit) * self.lanes + lane))]
        units = self.block // UNIT
        block = (group * blocks + unit // units) * self.block_words
        words = block + self.header_words + unit % units * self.unit_words

        def half(at: UOp) -> UOp:
            return self._as_factor(k.load(stream, at + lane))

        scales, minima = [half(block)] * 2, None
        if "m" in self.format.scales:
            minima = [half(block + self.lanes)] * 2
        if self.has_small_scales:
            small = k.load(stream, words + lane)
            low, high = small & 255, shift_right(small, 8)
            if minima is None:
                low, high = (b.cast(U8).bitcast(I8) for b in (low, high))
                scales = [scale * b.cast(F32) for scale, b in zip(scales, (low, high), strict=True)]
                if self.format.group == UNIT:
                    scales = [scales[0]] * 2
            elif self.format.has_nibble_scales:
                scales = [scales[0] * (b & 15).cast(F32) for b in (low, high)]
                minima = [minima[0] * shift_right(b, 4).cast(F32) for b in (low, high)]
            else:
                scales, minima = [scales[0] * low.cast(F32)] * 2, [minima[0] * high.cast(F32)] * 2
            words = words + self.lanes
        values: list[UOp | None] = [None] * UNIT
        low_bit = 0
        for bits in self.planes:
            for c in range(UNIT):

                def field(vector: int, low: int, width: int, c: int = c, words: UOp = words) -> UOp:
                    at = words + vector * (2 * self.lanes) + lane * 2 + c % 2
                    return shift_right(k.load(stream, at), low) & (2**width - 1)

                pair = c // 2
                three, last = pair // 8 * 3, pair % 8 - 6
                if bits != 6:
                    value = field(pair // (16 // bits), pair % (16 // bits) * bits, bits)
                elif last < 0:
                    value = field(three + pair % 8 // 2, pair % 2 * 6, 6)
                else:
                    value = field(three + last, 12, 4) | shift_left(field(three + 2, 12 + 2 * last, 2), 4)
                lower = values[c]
                values[c] = value if lower is None else lower | shift_left(value, low_bit)
            words, low_bit = words + self.lanes * 2 * bits, low_bit + bits
        integers = [v for v in values if v is not None]
        if self.codebook:
            integers = [piecewise_linear(v.cast(I16), self.codebook) for v in integers]
        weights = [
            (v.cast(F32) - float(self.format.offset)) * scales[c * 2 // UNIT] for c, v in enumerate(integers)
        ]
        return weights if minima is None else [w - minima[c * 2 // UNIT] for c, w in enumerate(weights)]


def piecewise_linear(q: UOp, numbers: Sequence[int]) -> UOp:
    """The numbers at indices, int16: the line through the first two numbers, and for each place where the line bends a
    multiple of maximum(q, place), for what has no instruction that looks up 16-bit numbers."""
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    value, constant = q * steps[0] if steps[0] != 1 else q, numbers[0]
    for place, (a, b) in enumerate(itertools.pairwise(steps), 1):
        if bend := b - a:
            hinge = q.maximum(UOp.const(place, I16))
            value, constant = value + (hinge * bend if bend != 1 else hinge), constant - bend * place
    return value + constant


def as_float(v: UOp) -> UOp:
    """A float of any type as float32."""
    if v.dtype == dtypes.bfloat16:  # the upper half of a float32
        return (v.bitcast(U16).cast(dtypes.uint32) * 65536).bitcast(F32)
    return v.cast(F32)
