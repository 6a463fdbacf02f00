"""Types whose blocks name points of grids, in blocks of 4 bits a weight that stand for exactly the same numbers.

IQ1, IQ2 and IQ3 store for each four or eight neighbouring weights the number of a point in a table of 256 to 2,048, and
their signs. So a weight is one of 6 to 16 numbers, times a scale. What is read from the file becomes indices of these
numbers (`engine.formats.quantization.WIDENED`), so kernels need neither the tables nor code of their own. It takes 4.25
to 4.5 bits a weight in memory, in place of the file's 1.6 to 3.4. TQ1_0, five ternary numbers in a byte, becomes
TQ2_0, and Q1_0, whose bits stand for d and -d, becomes Q2_0. I2_S becomes TQ2_0 with a d of 1.

The scales of NVFP4, small floats of 16 weights each, become integers of 7 bits with a power of two for 64 weights. They
are the same numbers, except those below an eighth of the largest of the four: these are rounded to 1/128 of it or less.

Block layouts: block_iq1_s to block_iq3_s, block_tq1_0 and block_q1_0 in ggml/src/ggml-common.h of llama.cpp. Meaning
of the bits: the functions dequantize_row_* in ggml/src/ggml-quants.c. The grids come from the package gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import FORMATS, WIDER

Bytes = NDArray[np.uint8]
Integers = NDArray[np.integer[Any]]
_BLOCK = 256
_RUN = 2048  # blocks at a time: half as long as all at once, and little memory


def file_bytes(ggml_type: int, n_bytes: int) -> int:
    """How many bytes of a tensor in the file become so many: a multiple of `step_bytes`."""
    return (
        n_bytes // step_bytes(ggml_type) * GGML_TYPES[ggml_type].block_bytes
        if ggml_type in WIDER
        else n_bytes
    )


def step_bytes(ggml_type: int) -> int:
    """The bytes that a block of the file becomes, of a type in `WIDER`."""
    wide = FORMATS[WIDER[ggml_type]]
    return GGML_TYPES[ggml_type].block // wide.block * wide.block_bytes


def widened(ggml_type: int, raw: Bytes) -> Bytes:
    """The bytes of whole blocks of a file, uint8 (n,), as the type that `read_as` gives: those of other types as they
    are."""
    if ggml_type not in WIDER:
        return raw
    blocks, step = raw.reshape(-1, GGML_TYPES[ggml_type].block_bytes), step_bytes(ggml_type)
    wide = np.empty((len(blocks), step), np.uint8)
    for i in range(0, len(blocks), _RUN):
        wide[i : i + _RUN] = _WIDENERS[ggml_type](blocks[i : i + _RUN]).reshape(-1, step)
    return wide.reshape(-1)


# --- each type: uint8 (blocks, bytes of a block) -> (blocks, bytes of a wider one) --------------------------


def _iq3_xxs(blocks: Bytes) -> Bytes:
    d, points, words = np.split(blocks, (2, 66), axis=1)
    packed = words.copy().view("<u4")
    signs = _unpacked(packed, 7, 4)
    codes = _grid("IQ3_XXS")[points].view(np.uint64) ^ _flips(15)[_eighth_signs()[signs]]
    return _joined(d, packed >> 28, codes)


def _iq3_s(blocks: Bytes) -> Bytes:
    d, low, high, signs, scales = np.split(blocks, (2, 66, 74, 106), axis=1)
    points = low | np.unpackbits(high, axis=1, bitorder="little").astype(np.uint16) << 8
    codes = _grid("IQ3_S")[points].view(np.uint64) ^ _flips(15)[signs]
    return _joined(d, _unpacked(scales, 4, 2), codes)


def _iq2_xxs(blocks: Bytes) -> Bytes:
    d, words = np.split(blocks, (2,), axis=1)
    words = words.reshape(len(blocks), -1, 8)
    points, packed = words[:, :, :4].reshape(len(blocks), -1), words[:, :, 4:].copy().view("<u4")[:, :, 0]
    codes = _grid("IQ2_XXS")[points] ^ _flips(7)[_eighth_signs()[_unpacked(packed, 7, 4)]]
    return _joined(d, np.repeat(packed >> 28, 2, axis=1), codes)


def _iq2_xs(blocks: Bytes) -> Bytes:
    d, words, scales = np.split(blocks, (2, 66), axis=1)
    words = words.copy().view("<u2")
    codes = _grid("IQ2_XS")[words & 511] ^ _flips(7)[_eighth_signs()[words >> 9]]
    return _joined(d, _unpacked(scales, 4, 2), codes)


def _iq2_s(blocks: Bytes) -> Bytes:
    d, low, signs, high, scales = np.split(blocks, (2, 34, 66, 74), axis=1)
    points = low | _unpacked(high, 2, 4).astype(np.uint16) << 8
    return _joined(d, _unpacked(scales, 4, 2), _grid("IQ2_S")[points] ^ _flips(7)[signs])


def _iq1_s(blocks: Bytes) -> Bytes:
    d, low, high = np.split(blocks, (2, 34), axis=1)
    words = high.copy().view("<u2")
    points = low | (_unpacked(words, 3, 4) & 7) << 8
    codes = _grid("IQ1_S")[points] + np.repeat(_ONES * (1 - (words >> 15)), 4, axis=1)
    return _joined(d, np.repeat(words >> 12 & 7, 2, axis=1), codes)


def _iq1_m(blocks: Bytes) -> Bytes:
    low, high, scales = np.split(blocks, (32, 48), axis=1)
    words, nibbles = scales.copy().view("<u2"), _unpacked(high, 4, 2)
    d = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16)
    points = low | (nibbles & 7).astype(np.uint16) << 8
    codes = _grid("IQ1_S")[points] + _ONES * (1 - (nibbles >> 3))
    return _joined(d[:, None].view(np.uint8), _unpacked(words, 3, 4) & 7, codes)


def _tq1_0(blocks: Bytes) -> Bytes:
    """The five numbers of a byte are its digits to the base of 3, as a fraction of 256."""
    runs = np.split(blocks, (32, 48, 52), axis=1)
    digits = [
        ((run[:, None, :] * np.array(powers, np.uint8)[:, None]).astype(np.uint16) * 3 >> 8).astype(np.uint8)
        for run, powers in zip(runs, ((1, 3, 9, 27, 81), (1, 3, 9, 27, 81), (1, 3, 9, 27)), strict=False)
    ]
    q = np.concatenate([part.reshape(len(blocks), -1) for part in digits], axis=1).reshape(-1, 2, 4, 32)
    packed = q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6
    return np.concatenate([packed.reshape(len(blocks), -1), blocks[:, 52:]], axis=1)


def _i2_s(blocks: Bytes) -> Bytes:
    """The four numbers of a byte come in the other order. The file has the scale of a tensor by itself."""
    turned = blocks >> 6 | blocks >> 2 & 0x0C | blocks << 2 & 0x30 | blocks << 6
    return np.concatenate([turned, np.tile(_ONE, (len(blocks), 1))], axis=1)


def _q1_0(blocks: Bytes) -> Bytes:
    """A block becomes two, with bits of twice their value."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(-1, 16, 4)
    packed = bits[:, :, 0] << 1 | bits[:, :, 1] << 3 | bits[:, :, 2] << 5 | bits[:, :, 3] << 7
    return np.concatenate([np.repeat(blocks[:, :2], 2, axis=0), packed], axis=1)


def _nvfp4(blocks: Bytes) -> Bytes:
    """A scale has 4 bits of an exponent, 0 as 1 but without the leading bit, and 3 of a significand; 127 stands for
    0."""
    small = blocks[:, :4].astype(np.int32)
    exponents, significands = small >> 3 & 15, small & 7 | (small >> 3 & 15 > 0) * 8
    significands[small == 127] = 0
    exponents = np.maximum(exponents, 1)
    top = np.where(significands > 0, exponents, 1).max(1, keepdims=True)
    scales = np.rint(significands * 8.0 * np.exp2(exponents - top)).astype(np.uint8)
    d = np.exp2(top - 3.0).astype(np.float16).view(np.uint8)
    of_groups = blocks[:, 4:].reshape(-1, 4, 1, 8) >> np.array([[0], [4]], np.uint8) & 15
    codes = of_groups.reshape(len(blocks), 64)
    return np.concatenate([d, scales, codes[:, :32] | codes[:, 32:] << 4], axis=1)


_WIDENERS: dict[int, Callable[[Bytes], Bytes]] = {
    16: _iq2_xxs, 17: _iq2_xs, 18: _iq3_xxs, 19: _iq1_s, 21: _iq3_s, 22: _iq2_s, 29: _iq1_m, 34: _tq1_0,
    36: _i2_s,
    40: _nvfp4, 41: _q1_0,
}  # fmt: skip

# --- what they share ---------------------------------------------------------------------------------------

_ONE = np.array([1.0], np.float16).view(np.uint8)
_ONES = np.uint64(0x0101010101010101)


def _joined(d: Bytes, scales: Integers, codes: NDArray[np.uint64]) -> Bytes:
    """Blocks of d, of the scales 2 s + 1 and of the codes, a byte each."""
    flat = codes.view(np.uint8).reshape(len(d), _BLOCK)
    packed = flat[:, : _BLOCK // 2] | flat[:, _BLOCK // 2 :] << 4
    return np.concatenate([d, (2 * scales + 1).astype(np.uint8), packed], axis=1)


def _unpacked(values: Integers, bits: int, n: int) -> Integers:
    """The n numbers of so many bits in each value, the lowest first: (blocks, values) -> (blocks, n * values)."""
    shifts = np.arange(n, dtype=values.dtype) * values.dtype.type(bits)
    found: Integers = values[:, :, None] >> shifts & values.dtype.type((1 << bits) - 1)
    return found.reshape(len(values), -1)


@functools.cache
def _grid(name: str) -> NDArray[np.uint64]:
    """The points of a grid, the code of each coordinate in a byte: of positive ones for types with signs, of -1, 0 and
    1 less an eighth else. Of IQ3, whose points have four coordinates, uint32."""
    from gguf import quants  # takes a quarter of a second

    kind = getattr(quants, name)
    kind.init_grid()
    places = np.searchsorted(kind.grid_map, kind.grid[0, 0])
    first, step = {"IQ1": (0, 2), "IQ2": (4, 1), "IQ3": (8, 1)}[name[:3]]
    codes = (places * step + first).astype(np.uint8)
    points: NDArray[np.uint64] = codes.view(np.uint64 if codes.shape[1] == 8 else np.uint32)[:, 0]
    return points


@functools.cache
def _flips(code: int) -> NDArray[np.uint64]:
    """For each byte of signs the eight bytes that a point's codes change by: the codes of a number and of minus it are
    all bits apart."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(code)).view(np.uint64)[:, 0]


@functools.cache
def _eighth_signs() -> Bytes:
    """For each seven signs a byte of eight, of which an even number are minus."""
    return np.array([s | (s.bit_count() & 1) << 7 for s in range(128)], np.uint8)
