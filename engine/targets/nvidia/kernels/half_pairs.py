"""Quantized weights as pairs of half-precision numbers, for tensor cores.

A register holds two float16, and an instruction computes with both. So a pair of weights takes about three
instructions, where two float32 and their conversion take nine. Integers of two columns are masked within a word, or
within one put together from bytes of two. A field whose lowest bit is at p of a half is the denormal float16
q * 2**(p - 24), exactly. One multiplication makes it (q - offset) * 2**-9, still exact, and the next applies the scale
and the minimum.

The columns of a pair are four apart: 0 and 4, 1 and 5, 2 and 6, 3 and 7 of eight neighbours (`PAIRS`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.targets.nvidia.kernels.bit_packing import BitPacking
from engine.targets.nvidia.kernels.half_words import chosen_bytes, constants, halves, is_cuda, pairwise
from engine.targets.nvidia.kernels.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.uops import F16, U32, bitwise_or, f32, mask, shift, shift_right
from engine.targets.nvidia.kernels.weight_layout import QUARTER, Unit, WeightLayout

RUN = 8
PAIRS = tuple((i, i + 4) for i in range(4))
"""The columns of the pairs of eight neighbouring columns, in the order of a product's activations."""

_DENORMAL, _MANTISSA = 24, 10  # float16's smallest denormal is 2**-24; stored bits of its significand
_CENTER = 9  # fields become q * 2**-9: no scale below 128 is beyond half precision then

Pair = tuple[UOp, UOp]


def unit_pairs(unit: Unit) -> list[Pair]:
    """The weights of a unit, float16: `PAIRS` of each eight columns in turn. Floats, codes and what is not for CUDA
    are converted one by one."""
    layout = unit.layout
    if not _has_pairs(layout):
        return _converted(unit.values())
    scales = [_scales(*unit.factors(g)) for g in range(UNIT // layout.group)]
    return [_weights(layout, unit.words, a, b, *scales[a // layout.group]) for a, b in _columns(UNIT)]


def quarter_pairs(
    layout: WeightLayout, planes: Sequence[UOp], row: UOp, units: int, unit: UOp, part: UOp
) -> list[Pair]:
    """As `unit_pairs`, of the columns of `WeightLayout.quarter`."""
    if not _has_pairs(layout):
        return _converted(layout.quarter(planes, row, units, unit, part))
    words, d, m = layout.load_quarter(planes, row, units, unit, part)
    scales = _scales(d, m)
    return [_weights(layout, words, a, b, *scales) for a, b in _columns(QUARTER)]


def _has_pairs(layout: WeightLayout) -> bool:
    format = layout.format
    return is_cuda() and not (format is None or format.codebook or format.exponent)


def _columns(n: int) -> list[tuple[int, int]]:
    return [(run + a, run + b) for run in range(0, n, RUN) for a, b in PAIRS]


def _converted(values: Sequence[UOp]) -> list[Pair]:
    halves = [value.cast(F16) for value in values]
    return [(halves[a], halves[b]) for a, b in _columns(len(halves))]


def _scales(d: UOp, m: UOp | None) -> tuple[UOp, UOp | None]:
    """A scale times 2**9, and a minimum times -1: each twice in a word."""
    scale = _twice(d * f32(2.0**_CENTER))
    return scale, None if m is None else _twice(m * f32(-1))


def _weights(
    layout: WeightLayout, words: Sequence[UOp], a: int, b: int, scale: UOp, minimum: UOp | None
) -> Pair:
    """The weights of columns a and b of a group."""
    (first, p), (second, q) = (_window(BitPacking(layout.bits), words, column) for column in (a, b))
    ones = (1 << layout.bits) - 1
    fields = mask(_joined(first, second), ones << p | ones << (q + 16))
    powers = constants(*(2.0 ** (_DENORMAL - _CENTER - place) for place in (p, q)))
    if minimum is not None:
        return _pair(pairwise("__hfma2", pairwise("__hmul2", fields, powers), scale, minimum))
    offset = -layout.offset * 2.0**-_CENTER
    return _pair(pairwise("__hmul2", pairwise("__hfma2", fields, powers, constants(offset, offset)), scale))


_Window = tuple[UOp, int]


def _window(packing: BitPacking, words: Sequence[UOp], column: int) -> tuple[_Window, int]:
    """A word and the first of two of its bytes that hold the integer of a column, and the lowest bit of that."""
    period, place = divmod(column, packing.period)
    words, fields = words[period * packing.words :], packing.fields(place)
    if len(fields) > 1:
        moved = [mask(shift(words[w], low - start), ((1 << n) - 1) << start) for w, low, n, start in fields]
        return (bitwise_or(moved), 0), 0
    word, low, bits, _ = fields[0]
    byte, bit = low // 8, low % 8
    if bit + bits > _MANTISSA:
        return (shift_right(words[word], low), 0), 0
    return (words[word], byte), bit


def _joined(first: _Window, second: _Window) -> UOp:
    """Two bytes of a word, and above them two of another."""
    (a, i), (b, j) = first, second
    if a is b and (i, j) == (0, 2):
        return a
    return chosen_bytes(a, b, (i, min(i + 1, 3), j + 4, min(j + 1, 3) + 4))


def _pair(word: UOp) -> Pair:
    low, high = halves(word)
    return low, high


def _twice(value: UOp) -> UOp:
    return UOp(Ops.CUSTOM, U32, (value,), "tg_bitcast<uint>(__float2half2_rn({0}))")
