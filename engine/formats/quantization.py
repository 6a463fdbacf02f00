"""GGUF quantization types, described once: what the bits of a file's blocks mean.

Every type stores integers q of a few bits, in groups that share a scale and perhaps a minimum:

    w = d * scale * (q - offset) - m * minimum

with half-precision d and m a block, and small integers scale and minimum a group (1 where a type has none).
`Format.fields` takes blocks apart into these. Kernels multiply in layouts of their own, built from the fields.

Block layouts: ggml/src/ggml-common.h (block_q4_0 to block_q6_K); the meaning of their bits: the functions
dequantize_row_* in ggml/src/ggml-quants.c, both of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

_SIMPLE, _SIMPLE_MIN, _K_MIN, _K = ("d",), ("d", "m"), ("d", "scale", "m", "minimum"), ("d", "scale")


@dataclass(frozen=True)
class Fields:
    """Blocks taken apart. n blocks: `q` uint8 (n, block); `d`, `m` float16 (n, 1); `scale`, `minimum` int8 or
    uint8 (n, groups). None stands for 1 (d, scale, minimum) or for no minimum at all (m)."""

    q: Tensor
    d: Tensor
    scale: Tensor | None = None
    m: Tensor | None = None
    minimum: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """A quantization type: `block` elements in `block_bytes`, scales shared by `group` elements, integers of
    `sum(bits)` bits kept in planes of `bits` each (lowest first), `offset` subtracted from them; `scales` are
    the names of the planes beside them."""

    name: str
    block: int
    block_bytes: int
    bits: tuple[int, ...]
    group: int
    offset: int
    scales: tuple[str, ...]
    fields: Callable[[Tensor], Fields]


def _half(b: Tensor) -> Tensor:
    return b.bitcast(dtypes.float16)


def _spread(b: Tensor, bits: int) -> Tensor:
    """uint8 (n, k, w) holding 8/bits fields a byte -> (n, k, 8/bits, w): first fields first."""
    shift = (Tensor.arange(8 // bits).reshape(1, 1, -1, 1) * bits).cast(dtypes.uint8)
    return (b.unsqueeze(2) >> shift) & (2**bits - 1)


def _nibbles(b: Tensor, width: int) -> Tensor:
    """uint8 (n, bytes) -> (n, 2*bytes): of each `width` bytes all low nibbles, then all high ones."""
    return _spread(b.reshape(b.shape[0], -1, width), 4).reshape(b.shape[0], -1)


def _bit_rows(b: Tensor) -> Tensor:
    """uint8 (n, w) -> (n, 8*w): bit 0 of every byte, then bit 1 of every byte, …"""
    return _spread(b.unsqueeze(1), 1).reshape(b.shape[0], -1)


def _bit_runs(b: Tensor) -> Tensor:
    """uint8 (n, w) -> (n, 8*w): the bits of byte 0 from the lowest, then those of byte 1, …"""
    return _spread(b.reshape(b.shape[0], -1, 1), 1).reshape(b.shape[0], -1)


def _k_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit minima (get_scale_min_k4)."""
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = (a & 63).cat((c & 15) | ((a >> 6) << 4), dim=1)
    minimum = (b & 63).cat((c >> 4) | ((b >> 6) << 4), dim=1)
    return scale, minimum


def _q4_0(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 2:18], 16), _half(b[:, 0:2]))


def _q4_1(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 4:20], 16), _half(b[:, 0:2]), m=-_half(b[:, 2:4]))


def _q5_0(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 6:22], 16) | (_bit_runs(b[:, 2:6]) << 4), _half(b[:, 0:2]))


def _q5_1(b: Tensor) -> Fields:
    q = _nibbles(b[:, 8:24], 16) | (_bit_runs(b[:, 4:8]) << 4)
    return Fields(q, _half(b[:, 0:2]), m=-_half(b[:, 2:4]))


def _q8_0(b: Tensor) -> Fields:
    return Fields(b[:, 2:34] ^ 128, _half(b[:, 0:2]))


def _q4_k(b: Tensor) -> Fields:
    scale, minimum = _k_scales(b[:, 4:16])
    return Fields(_nibbles(b[:, 16:144], 32), _half(b[:, 0:2]), scale, _half(b[:, 2:4]), minimum)


def _q5_k(b: Tensor) -> Fields:
    scale, minimum = _k_scales(b[:, 4:16])
    q = _nibbles(b[:, 48:176], 32) | (_bit_rows(b[:, 16:48]) << 4)
    return Fields(q, _half(b[:, 0:2]), scale, _half(b[:, 2:4]), minimum)


def _q6_k(b: Tensor) -> Fields:
    n = b.shape[0]
    low = _spread(b[:, 0:128].reshape(n, 2, 64), 4).reshape(n, 256)
    high = _spread(b[:, 128:192].reshape(n, 2, 32), 2).reshape(n, 256)
    return Fields(low | (high << 4), _half(b[:, 208:210]), b[:, 192:208].bitcast(dtypes.int8))


# ggml type id -> format. Ids: enum ggml_type in ggml/include/ggml.h.
QUANTIZED: Mapping[int, Format] = {
    2: Format("Q4_0", 32, 18, (4,), 32, 8, _SIMPLE, _q4_0),
    3: Format("Q4_1", 32, 20, (4,), 32, 0, _SIMPLE_MIN, _q4_1),
    6: Format("Q5_0", 32, 22, (4, 1), 32, 16, _SIMPLE, _q5_0),
    7: Format("Q5_1", 32, 24, (4, 1), 32, 0, _SIMPLE_MIN, _q5_1),
    8: Format("Q8_0", 32, 34, (8,), 32, 128, _SIMPLE, _q8_0),
    12: Format("Q4_K", 256, 144, (4,), 32, 0, _K_MIN, _q4_k),
    13: Format("Q5_K", 256, 176, (4, 1), 32, 0, _K_MIN, _q5_k),
    14: Format("Q6_K", 256, 210, (4, 2), 16, 32, _K, _q6_k),
}
FLOATS = {0: dtypes.float32, 1: dtypes.float16, 30: dtypes.bfloat16}
