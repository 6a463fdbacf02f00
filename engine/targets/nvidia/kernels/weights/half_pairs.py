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

from engine.kernels.fields import FLOAT_TYPES
from engine.targets.nvidia.kernels.half_words import (
    chosen_bytes,
    constants,
    halves,
    is_cuda,
    pairwise,
    rounded,
)
from engine.targets.nvidia.kernels.uops import F16, U32, bitwise_or, f32, mask, shift, shift_right
from engine.targets.nvidia.kernels.weights.bit_packing import (
    E2M1_HALF_EXPONENT,
    BitPacking,
    code_words,
    e2m1_halves,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import Unit, WeightLayout

RUN = 8
PAIRS = tuple((i, i + 4) for i in range(4))
"""The columns of the pairs of eight neighbouring columns, in the order of a product's activations."""

_DENORMAL, _MANTISSA = 24, 10  # float16's smallest denormal is 2**-24; stored bits of its significand
_CENTER = 9  # fields become q * 2**-9: no scale below 128 is beyond half precision then

Pair = tuple[UOp, UOp]
_Window = tuple[UOp, int]  # a word, and the first of two of its bytes
_At = tuple[_Window, int]  # and the lowest bit of an integer there


def unit_pairs(unit: Unit) -> list[Pair]:
    """The weights of a unit, float16: `PAIRS` of each eight columns in turn. What is not for CUDA is converted one by
    one."""
    layout = unit.layout
    if not is_cuda():
        return _converted(unit.values())
    if layout.format is None:
        return _floats(layout, unit.words, UNIT)
    scales = [_scales(layout, *unit.factors(g)) for g in range(UNIT // layout.group)]
    words = BitPacking(layout.bits).joined(unit.words)
    runs = (_run(layout, words, first, *scales[first // layout.group]) for first in range(0, UNIT, RUN))
    return [pair for run in runs for pair in run]


def quarter_pairs(layout: WeightLayout, loaded: Sequence[UOp], part: UOp) -> list[Pair]:
    """As `unit_pairs`, of a quarter (`WeightLayout.load_quarter`)."""
    if not is_cuda():
        return _converted(layout.quarter(loaded, part))
    if layout.format is None:
        return _floats(layout, loaded, QUARTER)
    words, d, m = layout.integers(loaded, part)
    words, scales = BitPacking(layout.bits).joined(words), _scales(layout, d, m)
    return [pair for first in range(0, QUARTER, RUN) for pair in _run(layout, words, first, *scales)]


def _converted(values: Sequence[UOp]) -> list[Pair]:
    halves = [value.cast(F16) for value in values]
    return [(halves[run + a], halves[run + b]) for run in range(0, len(halves), RUN) for a, b in PAIRS]


def _floats(layout: WeightLayout, words: Sequence[UOp], n: int) -> list[Pair]:
    """The pairs of n floats. Those of float16 are put together from the bytes of two words; an instruction makes a pair
    of two others."""
    columns = [(first + a, first + b) for first in range(0, n, RUN) for a, b in PAIRS]
    if FLOAT_TYPES[layout.ggml_type] == F16:
        parts = [(words[a // 2], words[b // 2], a % 2 * 2) for a, b in columns]
        return [_pair(chosen_bytes(a, b, (i, i + 1, i + 4, i + 5))) for a, b, i in parts]
    return [_pair(rounded(*(layout.float_of(words, column) for column in pair))) for pair in columns]


def _scales(layout: WeightLayout, d: UOp, m: UOp | None) -> tuple[UOp, UOp | None]:
    """A scale times 2**9 (of MXFP4 as it is), and a minimum times -1: each twice in a word."""
    scale = _twice(d * f32(2.0 ** _center(layout)))
    return scale, None if m is None else _twice(m * f32(-1))


def _center(layout: WeightLayout) -> int:
    return 0 if layout.format and layout.format.exponent else _CENTER


def _run(
    layout: WeightLayout, words: Sequence[UOp], first: int, scale: UOp, minimum: UOp | None
) -> list[Pair]:
    """The weights of eight columns of a group from `first` on. `words`: joined."""
    format = layout.format
    if layout.is_e2m1:
        power = E2M1_HALF_EXPONENT - _center(layout)
        numbers = (_small_floats(words[first // RUN], i, power) for i, _ in PAIRS)
        return [_pair(pairwise("__hmul2", number, scale)) for number in numbers]
    if format and layout.has_codes:
        codes = code_words(words[first // RUN], layout.codes)
        return [
            _weights(8, ((codes[0], i), 0), ((codes[1], i), 0), layout.offset, scale, None) for i, _ in PAIRS
        ]
    packing, columns = BitPacking(layout.bits), ((first + a, first + b) for a, b in PAIRS)
    windows = (tuple(_window(packing, words, column) for column in pair) for pair in columns)
    return [_weights(layout.bits, a, b, layout.offset, scale, minimum) for a, b in windows]


def _small_floats(word: UOp, i: int, power: int) -> UOp:
    """Floats i and i + 4 of 4 bits of a word, as `from_e2m1` gives them, times 2**power."""
    factor = 2.0**power
    return pairwise("__hmul2", e2m1_halves(word, i, 9), constants(factor, factor))


def _weights(bits: int, first: _At, second: _At, offset: float, scale: UOp, minimum: UOp | None) -> Pair:
    """The weights of two columns of a group, whose integers are at these places."""
    (a, p), (b, q) = first, second
    ones = (1 << bits) - 1
    fields = mask(_joined(a, b), ones << p | ones << (q + 16))
    powers = constants(*(2.0 ** (_DENORMAL - _CENTER - place) for place in (p, q)))
    if minimum is not None:
        return _pair(pairwise("__hfma2", pairwise("__hmul2", fields, powers), scale, minimum))
    less = -offset * 2.0**-_CENTER
    return _pair(pairwise("__hmul2", pairwise("__hfma2", fields, powers, constants(less, less)), scale))


def _window(packing: BitPacking, words: Sequence[UOp], column: int) -> _At:
    """A word and the first of two of its bytes that hold the integer of a column, and the lowest bit of that."""
    period, place = divmod(column, packing.period)
    words, fields = words[period * packing.joined_words :], packing.joined_fields(place)
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
