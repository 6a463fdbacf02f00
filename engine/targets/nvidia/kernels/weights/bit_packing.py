"""Integers of 2, 3, 4, 5, 6 or 8 bits packed in 32-bit words, and how kernels unpack them.

A word holds 16, 8 or 4 integers of 2, 4 or 8 bits. Of 6 bits, a period of 16 integers has three words: each byte holds
one, and the upper two bits of bytes in the same place are those of another. Kernels join these to a fourth word before
they read them (`BitPacking.joined`). As of 4 bits, the bytes of a word are those of every other column.

Of 3 or 5 bits, each word holds as many whole integers as fit, and the bits left over at the top make up a last one. A
quarter of a unit, 16 columns, takes 1 or 2 words and a half of one, so that threads which have a
quarter each read nothing of another's but that other half. The period is the unit: the words of its quarters, then two
words of halves.

    bits  words  integers of a quarter
       3    1.5        16 = 10 whole in a word, 5 in a half, 1 of spare bits
       5    2.5        16 = 6 whole in each word, 3 in a half, 1 of spare bits

Columns four apart lie half a word apart there, and in joined words, as tensor cores' kernels want them (`half_pairs`).

**Fields as denormals.** If a field of a word lies within the lowest 24 bits, with its lowest bit at p, the masked word
read as a float32 is exactly q * 2**(p - 149). The kernel that produces activations multiplies them by 2**(CENTER - p).
Then each product takes one AND and one FMA, without a shift or a conversion, and all sums have the same factor
2**(CENTER - 149).

**Codebooks.** An integer of 4 bits may be an index of a codebook. The numbers of a word's eight indices are looked up
in four words of constants and become bytes of two words (`code_words`), which are unpacked as integers of 8 bits. Those
of MXFP4 are small floats, whose bits become those of a float32 (`pair_from_e2m1`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.formats.quantization import packed_codes
from engine.targets.nvidia.kernels.half_words import is_cuda, kept, picked_bytes
from engine.targets.nvidia.kernels.uops import F32, bitwise_or, mask, shift, shift_right, u32
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT

CENTER = 100
DENORMAL_EXPONENT = 149  # float32's smallest denormal is 2**-149
_WORD_BYTES = 4
_MANTISSA = 24  # bits of a float32's significand
_STORED, _BIAS = 23, 127  # of these, the stored ones; the bias of its exponent
_FRACTION_TOP = 15  # the lowest of the upper eight stored bits of the significand
_BASE = 0x43800000  # 256.0 as a float32, whose upper eight stored bits of the significand are whole numbers
CODES = 8  # indices of a codebook in a word
# `pair_from_e2m1` and `from_e2m1` give doubled numbers times 2**-these.
E2M1_EXPONENT, E2M1_HALF_EXPONENT = 127, 15


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
    def has_halves(self) -> bool:
        """Whether each quarter of a unit has a half of a word."""
        return self.bits % 2 == 1

    @property
    def has_bytes(self) -> bool:
        """Whether integers have bytes of their own, some of them once their bits are joined."""
        return self.bits == 6

    @property
    def period(self) -> int:
        """Integers in a period."""
        return UNIT if self.has_halves else math.lcm(self.bits, 32) // self.bits

    @property
    def words(self) -> int:
        """Words in a period."""
        return self.period * self.bits // 32

    @property
    def joined_words(self) -> int:
        """Words in a period, once they are joined."""
        return self.period // _WORD_BYTES if self.has_bytes else self.words

    @property
    def whole(self) -> int:
        """Whole integers in each word."""
        return 32 // self.bits

    @property
    def quarter_words(self) -> int:
        """Whole words of a quarter of a unit."""
        return QUARTER * self.bits // 32

    def fields(self, j: int) -> list[Field]:
        """The bits of integer j of a period in memory: one field, or several if it consists of spare bits."""
        if self.has_halves:
            return self._fields_of_quarters(j)
        if self.has_bytes:
            ((word, low, _, _),) = fields = self.joined_fields(j)
            return fields if word < self.words else self._spare([(w, low + 8, 2) for w in range(self.words)])
        return [Field(j // self.whole, j % self.whole * self.bits, self.bits, 0)]

    def joined_fields(self, j: int) -> list[Field]:
        """As `fields`, once the words are joined."""
        if not self.has_bytes:
            return self.fields(j)
        return [Field(j // 8 * 2 + j % 2, j % 8 // 2 * 8, self.bits, 0)]

    def joined(self, words: Sequence[UOp], apart: bool = False) -> list[UOp]:
        """The words of periods as integers are read from them. `apart`: whether a byte has no bits of other ones."""
        if not self.has_bytes:
            return [*words]
        joined: list[UOp] = []
        for first in range(0, len(words), self.words):
            three = words[first : first + self.words]
            joined += [mask(word, 0x3F3F3F3F) for word in three] if apart else three
            spare = [mask(shift(word, 6 - 2 * i), 0x03030303 << 2 * i) for i, word in enumerate(three)]
            joined.append(bitwise_or(spare))
        return joined

    def _fields_of_quarters(self, j: int) -> list[Field]:
        (quarter, column), n = divmod(j, QUARTER), self.quarter_words
        half, top = UNIT // QUARTER * n + quarter // 2, 16 * (quarter % 2 + 1)
        pair, side = column // 8 * 4 + column % 4, column % 8 // 4
        in_word, in_half = self.whole // 2, 16 // self.bits
        if pair < n * in_word:
            place = pair % in_word + side * in_word
            return [Field(quarter * n + pair // in_word, place * self.bits, self.bits, 0)]
        place = pair - n * in_word + side * (in_half + 1) // 2
        if place < in_half:
            return [Field(half, top - 16 + place * self.bits, self.bits, 0)]
        return self._spare([*((quarter * n + i, 32, 2) for i in range(n)), (half, top, 1)])

    @staticmethod
    def _spare(tops: Iterable[tuple[int, int, int]]) -> list[Field]:
        """The integer of so many bits below a bit of each word."""
        fields, start = [], 0
        for word, top, n in tops:
            fields.append(Field(word, top - n, n, start))
            start += n
        return fields

    def position(self, j: int) -> int:
        """The bit at which `unpack` leaves integer j: where it is if that is within a significand. Otherwise it and the
        integers above it in its word, or its half of one, are shifted down by as many bits."""
        (word, low, _, _), *others = self.joined_fields(j % self.period)
        if others:
            return 0
        if low + self.bits <= _MANTISSA:
            return low
        if self.bits == 8:  # an instruction makes a float of the highest byte
            return DENORMAL_EXPONENT
        is_half = self.has_halves and word >= UNIT // QUARTER * self.quarter_words
        return low - (16 if is_half else (_MANTISSA - self.bits) // self.bits * self.bits + self.bits)

    def unpack(self, words: Sequence[UOp], j: int) -> UOp:
        """Integer j of the period in joined `words`, shifted left by `position(j)`: uint32; the bits of a float32 if
        that is 149, where a denormal is the number itself."""
        if self.position(j) == DENORMAL_EXPONENT:
            return shift_right(words[j // self.whole], 24).cast(F32).bitcast(dtypes.uint32)
        return bitwise_or(self._moved(words, j, self.position(j)))

    def unpack_above_256(self, words: Sequence[UOp], j: int) -> UOp:
        """256 + q as a float32, where q is integer j of the period in joined `words`. q goes to the upper bits of the
        significand, so no conversion is needed."""
        return bitwise_or([*self._moved(words, j, _FRACTION_TOP), u32(_BASE)]).bitcast(F32)

    def unpack_above_base(self, words: Sequence[UOp], j: int) -> tuple[UOp, float]:
        """(base + q as a float32, base): as `unpack_above_256`, with fewer shifts. Fields that lie within a significand
        stay where they are, and the others of a word are shifted together, so the base is another power of two for
        each place: up to 2**(23 - least), of which float32 still resolves 1 / 1000."""
        (word, low, n, _), *others = self.joined_fields(j)
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
        for word, low, n, start in self.joined_fields(j):
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


def in_memory(codes: Sequence[int]) -> Sequence[int]:
    """The codes in the order of the indices in memory: more than eight lie in two tables, the even ones before the odd
    ones (`code_words`)."""
    return codes if len(codes) <= CODES else [*codes[0::2], *codes[1::2]]


def index_in_memory(q: Tensor, codes: Sequence[int]) -> Tensor:
    """Indices of `codes` as they are in memory, uint8."""
    return q if len(codes) <= CODES else (q >> 1) | ((q & 1) << 3)


def code_words(word: UOp, codes: Sequence[int], keeps: bool = False) -> list[UOp]:
    """The codes that a word's eight indices of 4 bits stand for: a byte each in two words. `codes`: up to 16 numbers
    below 256, in the order of `in_memory`. `keeps`: whether their tables stay in registers (`half_words.kept`).

    On CUDA an instruction picks four bytes, of eight. Each of two tables gives the bytes of its indices, and of the
    other's the sign of a byte. Its number in both tables is the same, and so are the highest bits of two codes that
    follow each other. So where it is set, an exclusive or with a table of inverted codes makes up for it. A code takes
    1.1 instructions, or 0.4 of up to eight codes."""
    keep = kept if keeps and is_cuda() else lambda constant: constant
    tables = [keep(u32(four)) for four in packed_codes(codes)]
    if not is_cuda():
        found = [_looked_up(word, j, tables * (4 // len(tables))) for j in range(CODES)]
        return [bitwise_or([shift(found[i + k], -8 * k) for k in range(4)]) for i in (0, 4)]
    if len(tables) == 2:
        return [picked_bytes(tables[0], tables[1], shift_right(word, by)) for by in (0, 16)]
    first, second = codes[:CODES], codes[CODES:]
    assert all((a < 128) == (b < 128) for a, b in zip(first, second, strict=True))
    inverted = [keep(u32(four)) for four in packed_codes([b if b < 128 else 255 - b for b in second])]
    other, words = word.alu(Ops.XOR, u32(0x88888888)), []
    for by in (0, 16):
        one = picked_bytes(tables[0], tables[1], shift_right(word, by))
        words.append(one.alu(Ops.XOR, picked_bytes(inverted[0], inverted[1], shift_right(other, by))))
    return words


def _looked_up(word: UOp, j: int, tables: Sequence[UOp]) -> UOp:
    """The code that index j of a word stands for."""
    bit = [mask(word, 1 << (4 * j + b)).ne(0) for b in (2, 3)]
    lower, upper = (bit[0].where(tables[i + 1], tables[i]) for i in (0, 2))
    place = mask(shift(word, 4 * j - 3), 3 << 3)
    return mask(shift_right(bit[1].where(upper, lower), place), 255)


def from_e2m1(word: UOp, j: int) -> UOp:
    """Float j of 4 bits of a word as a float32: twice its value times 2**-15. Its bits are a sign, two of an exponent,
    whose bias is 1, and one of the significand. They become those of a float16, where the bits of a denormal mean the
    same too."""
    bits = mask(shift(e2m1_halves(word, j % 4, 9), 16 * (j // 4)), 0xFFFF)
    return bits.cast(dtypes.uint16).bitcast(dtypes.float16).cast(F32)


def pair_from_e2m1(word: UOp, i: int) -> tuple[UOp, UOp]:
    """Floats i and i + 4 of 4 bits of a word as float32: twice their values times 2**-127. Their bits become those of
    the upper halves of two float32 at once: 4.1 instructions a weight with its FMA, in place of 5.1. Constants that
    tinygrad gathers at the end of a product would make these numbers denormal again."""
    bits = e2m1_halves(word, i, 6)
    return shift(bits, -16).bitcast(F32), mask(bits, 0xFFFF0000).bitcast(F32)


def e2m1_halves(word: UOp, i: int, low: int) -> UOp:
    """The bits of floats i and i + 4 of 4 bits of a word, each in a half of a word: the sign on top, the other three
    from bit `low` on."""
    magnitudes = mask(shift(word, 4 * i - low), 7 << low | 7 << (low + 16))
    return bitwise_or([magnitudes, mask(shift(word, 4 * i + 3 - 15), 1 << 15 | 1 << 31)])
