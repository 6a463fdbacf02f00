"""Integers of 2, 3, 4, 5, 6 or 8 bits packed in 32-bit words, and how kernels unpack them.

Each word holds as many whole integers as fit. The bits left over at the top of the words of a period make up the
period's last integers:

    bits  words  integers of a period
       2      1        16 = 16 whole
       3      3        32 = 10 whole in each word, 2 of spare bits
       4      1         8 = 8 whole
       5      5        32 = 6 whole in each word, 2 of spare bits
       6      3        16 = 5 whole in each word, 1 of spare bits
       8      1         4 = 4 whole

**Fields as denormals.** If a field of a word lies within the lowest 24 bits, with its lowest bit at p, the masked word
read as a float32 is exactly q * 2**(p - 149). The kernel that produces activations multiplies them by 2**(CENTER - p).
Then each product takes one AND and one FMA, without a shift or a conversion, and all sums have the same factor
2**(CENTER - 149).

**Codebooks.** An integer of 4 bits may be an index of a codebook. Its number is looked up in four words of constants
(`looked_up`), or, for MXFP4, is a small float whose bits become those of a float32 (`from_e2m1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes

from engine.formats.quantization import packed_codes
from engine.targets.nvidia.kernels.uops import F32, bitwise_or, mask, shift, shift_right, u32

CENTER = 100
DENORMAL_EXPONENT = 149  # float32's smallest denormal is 2**-149
_MANTISSA = 24  # bits of a float32's significand
_STORED, _BIAS = 23, 127  # of these, the stored ones; the bias of its exponent
_FRACTION_TOP = 15  # the lowest of the upper eight stored bits of the significand
_BASE = 0x43800000  # 256.0 as a float32, whose upper eight stored bits of the significand are whole numbers
E2M1_EXPONENT, E2M1_HALF_EXPONENT = 127, 15  # `from_e2m1` gives a doubled number times 2**-127 or 2**-15


class Field(NamedTuple):
    """Bits of an integer in a word: `n` bits from bit `low` of word `word` are its bits from `start` on."""

    word: int
    low: int
    n: int
    start: int


@dataclass(frozen=True)
class BitPacking:
    """Integers of `bits` bits in periods of 32-bit words."""

    bits: int

    @property
    def period(self) -> int:
        """Integers in a period."""
        return math.lcm(self.bits, 32) // self.bits

    @property
    def words(self) -> int:
        """Words in a period."""
        return math.lcm(self.bits, 32) // 32

    @property
    def whole(self) -> int:
        """Whole integers in each word."""
        return 32 // self.bits

    def fields(self, j: int) -> list[Field]:
        """The bits of integer j of a period: one field, or several if it consists of spare bits."""
        if j < self.whole * self.words:
            return [Field(j // self.whole, j % self.whole * self.bits, self.bits, 0)]
        spare = 32 % self.bits
        first, fields = (j - self.whole * self.words) * self.bits, []
        done = 0
        while done < self.bits:
            word, low = divmod(first + done, spare)
            n = min(spare - low, self.bits - done)
            fields.append(Field(word, 32 - spare + low, n, done))
            done += n
        return fields

    def half(self, words: Sequence[UOp], is_second: UOp) -> list[UOp]:
        """Words that hold the integers of a half of a period as words of a period hold its first ones."""
        n, halves = self.period // 2, []
        for start in range(0, n, self.whole):
            runs: list[list[int]] = []  # bits of the second half: [word, lowest bit, number of bits, place]
            for j in range(start, min(start + self.whole, n)):
                for word, low, bits, first in self.fields(n + j):
                    place = (j - start) * self.bits + first
                    if runs and runs[-1][0] == word and runs[-1][1] + runs[-1][2] == low:
                        runs[-1][2] += bits
                    else:
                        runs.append([word, low, bits, place])
            moved = [mask(shift(words[w], low - to), ((1 << k) - 1) << to) for w, low, k, to in runs]
            halves.append(is_second.where(bitwise_or(moved), words[start // self.whole]))
        return halves

    def position(self, j: int) -> int:
        """The bit at which `unpack` leaves integer j: where it is if that is within a significand."""
        (_, low, _, _), *others = self.fields(j % self.period)
        if others:
            return 0
        return low if low + self.bits <= _MANTISSA else low - self._first_high

    @property
    def _first_high(self) -> int:
        """The lowest bit of the first integer that does not fit a significand. It and the integers above it are shifted
        down by as many bits."""
        return (_MANTISSA - self.bits) // self.bits * self.bits + self.bits

    def unpack(self, words: Sequence[UOp], j: int) -> UOp:
        """Integer j of the period in `words`, shifted left by `position(j)`: uint32."""
        return bitwise_or(self._moved(words, j, self.position(j)))

    def unpack_above_256(self, words: Sequence[UOp], j: int) -> UOp:
        """256 + q as a float32, where q is integer j of the period in `words`. q goes to the upper bits of the
        significand, so no conversion is needed."""
        return bitwise_or([*self._moved(words, j, _FRACTION_TOP), u32(_BASE)]).bitcast(F32)

    def unpack_above_base(self, words: Sequence[UOp], j: int) -> tuple[UOp, float]:
        """(base + q as a float32, base): as `unpack_above_256`, with fewer shifts. Fields that lie within a significand
        stay where they are, and the others of a word are shifted together, so the base is another power of two for
        each place: up to 2**(23 - least), of which float32 still resolves 1 / 1000."""
        (word, low, n, _), *others = self.fields(j)
        if others:
            return self.unpack_above_256(words, j), 256.0
        least, most = min(14 - self.bits, 11), _STORED - self.bits
        by = 0
        if low < least:
            by = -least
        elif low > most:
            by = (most // self.bits + 1) * self.bits - least
        at = low - by
        base = u32((_BIAS + _STORED - at) << _STORED)
        field = mask(shift(words[word], by), ((1 << n) - 1) << at)
        return bitwise_or([field, base]).bitcast(F32), 2.0 ** (_STORED - at)

    def _moved(self, words: Sequence[UOp], j: int, to: int) -> list[UOp]:
        """The fields of integer j, moved to bit `to` and masked."""
        parts = []
        for word, low, n, start in self.fields(j):
            part = shift(words[word], low - (to + start))
            is_alone = low + n == 32 and to + start == 0  # the shift has cleared all other bits
            parts.append(part if is_alone else mask(part, ((1 << n) - 1) << (to + start)))
        return parts

    def pack(self, q: Tensor) -> Tensor:
        """Packs integers: uint8 (n, period) -> uint32 (n, words)."""
        q = q.cast(dtypes.uint32)
        words: list[Tensor | None] = [None] * self.words
        for j in range(self.period):
            for word, low, n, start in self.fields(j):
                part = ((q[:, j] >> start) & ((1 << n) - 1)) << low
                others = words[word]
                words[word] = part if others is None else others | part
        return Tensor.stack(*[w for w in words if w is not None], dim=1)


def looked_up(word: UOp, j: int, codes: Sequence[int]) -> UOp:
    """The code that integer j of 4 bits of a word stands for: uint32. `codes`: 16 numbers below 256."""
    four = [u32(packed) for packed in packed_codes(codes)]
    bit = [mask(word, 1 << (4 * j + b)).ne(0) for b in (2, 3)]
    lower, upper = (bit[0].where(four[i + 1], four[i]) for i in (0, 2))
    place = mask(shift(word, 4 * j - 3), 3 << 3)
    return mask(shift_right(bit[1].where(upper, lower), place), 255)


def looked_up_above_256(word: UOp, j: int, codes: Sequence[int]) -> UOp:
    """256 + code as a float32 (see `looked_up`)."""
    return bitwise_or([shift(looked_up(word, j, codes), -_FRACTION_TOP), u32(_BASE)]).bitcast(F32)


def from_e2m1(word: UOp, j: int, is_half: bool = False) -> UOp:
    """Float j of 4 bits of a word as a float32: twice its value times 2**-127, or 2**-15 if it `is_half`. Its bits are
    a sign, two of an exponent, whose bias is 1, and one of the significand. They become those of a float32, or of a
    float16, where the bits of a denormal mean the same too. Constants that tinygrad gathers at the end of a product
    would make numbers of the first kind denormal again."""
    low, sign = (9, 15) if is_half else (22, 31)
    magnitude = mask(shift(word, 4 * j - low), 7 << low)
    bits = bitwise_or([magnitude, mask(shift(word, 4 * j + 3 - sign), 1 << sign)])
    return bits.cast(dtypes.uint16).bitcast(dtypes.float16).cast(F32) if is_half else bits.bitcast(F32)
