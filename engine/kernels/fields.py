"""The numbers of quantized blocks (`engine.formats.quantization`), taken apart in tensor graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.formats.quantization import Format, Plane, Planes, packed_codes

FLOAT_TYPES: dict[int, DType] = {0: dtypes.float32, 1: dtypes.float16, 30: dtypes.bfloat16}
"""The types of matrices of floats, by ggml's type id."""


@dataclass(frozen=True)
class Fields:
    """The numbers in n blocks: `q` uint8 (n, block); `d` and `m` float16 (n, 1), or `d` uint8 for an exponent; `scale`
    and `minimum` int8 or uint8 (n, block / group). `scale` and `minimum` None stand for 1, `m` None for 0."""

    q: Tensor
    d: Tensor
    scale: Tensor | None = None
    m: Tensor | None = None
    minimum: Tensor | None = None


def fields_of(format: Format, blocks: Tensor) -> Fields:
    """Takes blocks apart, uint8 (n, block_bytes)."""

    def numbers(runs: Sequence[Planes]) -> Tensor | None:
        n = format.block // format.group // max(1, len(runs))
        parts = [_joined(planes, blocks, n) for planes in runs]
        return Tensor.cat(*parts, dim=1) if parts else None

    def half(byte: int) -> Tensor:
        return blocks[:, byte : byte + 2].bitcast(dtypes.float16)

    scale, minimum = numbers(format.scale), numbers(format.minimum)
    if scale is not None and format.scale[0][0].bits == 8:
        scale = scale.bitcast(dtypes.int8)
    elif scale is not None and format.scale_offset:
        scale = scale.cast(dtypes.int8) - format.scale_offset
    m = None if format.m is None else half(format.m) if format.minimum else -half(format.m)
    d = blocks[:, format.d : format.d + 1] if format.exponent else half(format.d)
    return Fields(_joined(format.q, blocks, format.block), d, scale, m, minimum)


def values_of(format: Format, q: Tensor) -> Tensor:
    """The numbers that the integers q stand for, float32 of the same shape: q - offset, or T[q]."""
    if not format.codebook:
        return q.cast(dtypes.float32) - format.offset
    words = [Tensor(word, dtype=dtypes.uint32, device=q.device) for word in packed_codes(format.codes)]
    word = (q < 4).where(words[0], words[1])
    if len(words) > 2:
        word = (q < 8).where(word, (q < 12).where(words[2], words[3]))
    codes = (word >> ((q & 3) * 8).cast(dtypes.uint32)) & 255
    return codes.cast(dtypes.float32) - format.code_offset


def factors_of(format: Format, d: Tensor) -> Tensor:
    """d as float32, of the same shape, times the type's factor."""
    as_float = (
        (d.cast(dtypes.uint32) << 23).bitcast(dtypes.float32) if format.exponent else d.cast(dtypes.float32)
    )
    return as_float if format.factor == 1 else as_float * format.factor


def _joined(planes: Planes, blocks: Tensor, n: int) -> Tensor:
    """n numbers of each block, uint8 (blocks, n)."""
    value, low = _read(planes[0], blocks, n), planes[0].bits
    for plane in planes[1:]:
        value, low = value | (_read(plane, blocks, n) << low), low + plane.bits
    return value


def _read(plane: Plane, blocks: Tensor, n: int) -> Tensor:
    """The n numbers of each block: uint8 (blocks, block_bytes) -> (blocks, n)."""
    shared = plane.in_a_byte(n)
    b = blocks[:, plane.byte : plane.byte + n // shared].reshape(blocks.shape[0], -1, 1, plane.width)
    if plane.bits < 8:
        shift: int | Tensor = plane.shift
        if shared > 1:
            shift = (Tensor.arange(shared).reshape(1, 1, -1, 1) * plane.bits + shift).cast(dtypes.uint8)
        b = (b >> shift) & (2**plane.bits - 1)
    return (b ^ 2 ** (plane.bits - 1) if plane.signed else b).reshape(-1, n)
