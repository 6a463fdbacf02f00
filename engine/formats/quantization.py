"""GGUF quantization types, each described once: what the bits of a block mean.

Every type stores integers q of a few bits, in groups that share a scale and perhaps a minimum:

    w = d * scale * (q - offset) - m * minimum

d and m are half precision, one of each in a block. scale and minimum are small integers, one of each in a group; types
without them have 1. `Format.fields` takes blocks apart into these numbers. The kernels' own layouts are made of them.

Block layouts: block_q4_0 to block_q6_K in ggml/src/ggml-common.h of llama.cpp. Meaning of the bits: the functions
dequantize_row_* in ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from engine.formats.ggml_types import GGML_TYPES


@dataclass(frozen=True)
class Fields:
    """The numbers in n blocks: `q` uint8 (n, block); `d` and `m` float16 (n, 1); `scale` and `minimum` int8 or uint8
    (n, block / group). `scale` and `minimum` None stand for 1, `m` None for 0."""

    q: Tensor
    d: Tensor
    scale: Tensor | None = None
    m: Tensor | None = None
    minimum: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """A quantization type. Its integers have sum(bits) bits, in planes of `bits` bits each, lowest first. A group has
    `group` elements. `scales`: the fields beside q. `fields` takes blocks apart, uint8 (n, block_bytes)."""

    ggml_type: int
    bits: tuple[int, ...]
    group: int
    offset: int
    scales: tuple[str, ...]
    fields: Callable[[Tensor], Fields]

    @property
    def name(self) -> str:
        return GGML_TYPES[self.ggml_type].name

    @property
    def block(self) -> int:
        """Elements of a block."""
        return GGML_TYPES[self.ggml_type].block

    @property
    def block_bytes(self) -> int:
        return GGML_TYPES[self.ggml_type].block_bytes


def _half(b: Tensor) -> Tensor:
    return b.bitcast(dtypes.float16)


def _spread(b: Tensor, bits: int) -> Tensor:
    """uint8 (n, k, w), 8 / bits integers in each byte -> (n, k, 8 / bits, w): the lowest bits of all bytes first."""
    shift = (Tensor.arange(8 // bits).reshape(1, 1, -1, 1) * bits).cast(dtypes.uint8)
    return (b.unsqueeze(2) >> shift) & (2**bits - 1)


def _nibbles(b: Tensor, width: int) -> Tensor:
    """uint8 (n, bytes) -> (n, 2 * bytes): of each `width` bytes all low nibbles, then all high ones."""
    return _spread(b.reshape(b.shape[0], -1, width), 4).reshape(b.shape[0], -1)


def _bits_by_position(b: Tensor) -> Tensor:
    """uint8 (n, w) -> (n, 8 * w): bit 0 of all bytes, then bit 1 of all bytes, …"""
    return _spread(b.unsqueeze(1), 1).reshape(b.shape[0], -1)


def _bits_by_byte(b: Tensor) -> Tensor:
    """uint8 (n, w) -> (n, 8 * w): the bits of byte 0 from the lowest, then those of byte 1, …"""
    return _spread(b.reshape(b.shape[0], -1, 1), 1).reshape(b.shape[0], -1)


def _k_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit minima: get_scale_min_k4 in ggml-quants.c."""
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = (a & 63).cat((c & 15) | ((a >> 6) << 4), dim=1)
    minimum = (b & 63).cat((c >> 4) | ((b >> 6) << 4), dim=1)
    return scale, minimum


def _q4_0(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 2:18], 16), _half(b[:, 0:2]))


def _q4_1(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 4:20], 16), _half(b[:, 0:2]), m=-_half(b[:, 2:4]))


def _q5_0(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 6:22], 16) | (_bits_by_byte(b[:, 2:6]) << 4), _half(b[:, 0:2]))


def _q5_1(b: Tensor) -> Fields:
    q = _nibbles(b[:, 8:24], 16) | (_bits_by_byte(b[:, 4:8]) << 4)
    return Fields(q, _half(b[:, 0:2]), m=-_half(b[:, 2:4]))


def _q8_0(b: Tensor) -> Fields:
    return Fields(b[:, 2:34] ^ 128, _half(b[:, 0:2]))


def _q4_k(b: Tensor) -> Fields:
    scale, minimum = _k_scales(b[:, 4:16])
    return Fields(_nibbles(b[:, 16:144], 32), _half(b[:, 0:2]), scale, _half(b[:, 2:4]), minimum)


def _q5_k(b: Tensor) -> Fields:
    scale, minimum = _k_scales(b[:, 4:16])
    q = _nibbles(b[:, 48:176], 32) | (_bits_by_position(b[:, 16:48]) << 4)
    return Fields(q, _half(b[:, 0:2]), scale, _half(b[:, 2:4]), minimum)


def _q6_k(b: Tensor) -> Fields:
    n = b.shape[0]
    low = _spread(b[:, 0:128].reshape(n, 2, 64), 4).reshape(n, 256)
    high = _spread(b[:, 128:192].reshape(n, 2, 32), 2).reshape(n, 256)
    return Fields(low | (high << 4), _half(b[:, 208:210]), b[:, 192:208].bitcast(dtypes.int8))


_FORMATS = (
    Format(2, bits=(4,), group=32, offset=8, scales=("d",), fields=_q4_0),
    Format(3, bits=(4,), group=32, offset=0, scales=("d", "m"), fields=_q4_1),
    Format(6, bits=(4, 1), group=32, offset=16, scales=("d",), fields=_q5_0),
    Format(7, bits=(4, 1), group=32, offset=0, scales=("d", "m"), fields=_q5_1),
    Format(8, bits=(8,), group=32, offset=128, scales=("d",), fields=_q8_0),
    Format(12, bits=(4,), group=32, offset=0, scales=("d", "scale", "m", "minimum"), fields=_q4_k),
    Format(13, bits=(4, 1), group=32, offset=0, scales=("d", "scale", "m", "minimum"), fields=_q5_k),
    Format(14, bits=(4, 2), group=16, offset=32, scales=("d", "scale"), fields=_q6_k),
)
# Both by ggml's type id.
QUANTIZED: Mapping[int, Format] = {format.ggml_type: format for format in _FORMATS}
FLOATS = {0: dtypes.float32, 1: dtypes.float16, 30: dtypes.bfloat16}
