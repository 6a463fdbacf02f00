"""GGUF quantization types, each described once: where a block holds its numbers, and what they mean.

Every type stores integers q of a few bits, in groups that share a scale and perhaps a minimum:

    w = d * scale * (q - offset) - m * minimum

d and m are half precision, one of each in a block. scale and minimum are small integers, one of each in a group; types
without them have 1. The kernels' own layouts are made of these numbers: from `Format.fields`, or from `Plane.position`.

Block layouts: block_q4_0 to block_q6_K in ggml/src/ggml-common.h of llama.cpp. Meaning of the bits: the functions
dequantize_row_* in ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinygrad import Tensor, UOp, dtypes

from engine.formats.ggml_types import GGML_TYPES

Index = TypeVar("Index", int, UOp)


@dataclass(frozen=True)
class Plane:
    """`bits` bits of each of n numbers, in the bytes of a block from `byte` on. Neighbouring numbers lie in
    neighbouring bytes, `width` of them; the next `width` numbers lie in the next higher bits of the same bytes, and so
    on; then come the next `width` bytes. The first numbers are `shift` bits up in their bytes. `signed`: the number is
    signed, and what is read is 2**(bits - 1) more."""

    bits: int
    byte: int
    width: int
    shift: int = 0
    signed: bool = False

    def in_a_byte(self, n: int) -> int:
        """How many of the n numbers share a byte."""
        return min(8 // self.bits, n // self.width)

    def position(self, i: Index, n: int) -> tuple[Index, Index]:
        """The byte of number i of n, and its lowest bit in the byte."""
        row, shared = i // self.width, self.in_a_byte(n)
        return self.byte + row // shared * self.width + i % self.width, self.shift + row % shared * self.bits

    def read(self, blocks: Tensor, n: int) -> Tensor:
        """The n numbers of each block: uint8 (blocks, block_bytes) -> (blocks, n)."""
        shared = self.in_a_byte(n)
        b = blocks[:, self.byte : self.byte + n // shared].reshape(blocks.shape[0], -1, 1, self.width)
        if self.bits < 8:
            shift: int | Tensor = self.shift
            if shared > 1:
                shift = (Tensor.arange(shared).reshape(1, 1, -1, 1) * self.bits + shift).cast(dtypes.uint8)
            b = (b >> shift) & (2**self.bits - 1)
        return (b ^ 2 ** (self.bits - 1) if self.signed else b).reshape(-1, n)


Planes = tuple[Plane, ...]  # of the same numbers, their lowest bits first


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
    """A quantization type. A group has `group` elements.

    `q`: the planes of its integers. `d` and `m`: the bytes where these begin. A type with m but without minima adds m
    instead of subtracting it. `scale` and `minimum`: the planes of the first numbers of a block, then those of as many
    more, if these lie elsewhere. Scales of 8 bits are signed, and all others are not."""

    ggml_type: int
    group: int
    offset: int
    q: Planes
    d: int = 0
    m: int | None = None
    scale: tuple[Planes, ...] = ()
    minimum: tuple[Planes, ...] = ()

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

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits of each plane of q, the lowest first."""
        return tuple(plane.bits for plane in self.q)

    @property
    def scales(self) -> tuple[str, ...]:
        """The fields beside q."""
        has = {"d": True, "scale": self.scale, "m": self.m is not None, "minimum": self.minimum}
        return tuple(name for name, is_there in has.items() if is_there)

    def fields(self, blocks: Tensor) -> Fields:
        """Takes blocks apart, uint8 (n, block_bytes)."""

        def numbers(runs: Sequence[Planes]) -> Tensor | None:
            n = self.block // self.group // max(1, len(runs))
            parts = [_joined(planes, blocks, n) for planes in runs]
            return Tensor.cat(*parts, dim=1) if parts else None

        def half(byte: int) -> Tensor:
            return blocks[:, byte : byte + 2].bitcast(dtypes.float16)

        scale, minimum = numbers(self.scale), numbers(self.minimum)
        if scale is not None and self.scale[0][0].bits == 8:
            scale = scale.bitcast(dtypes.int8)
        m = None if self.m is None else half(self.m) if self.minimum else -half(self.m)
        return Fields(_joined(self.q, blocks, self.block), half(self.d), scale, m, minimum)


def _joined(planes: Planes, blocks: Tensor, n: int) -> Tensor:
    """n numbers of each block, uint8 (blocks, n)."""
    value, low = planes[0].read(blocks, n), planes[0].bits
    for plane in planes[1:]:
        value, low = value | (plane.read(blocks, n) << low), low + plane.bits
    return value


# Eight 6-bit scales and eight 6-bit minima in 12 bytes: get_scale_min_k4 in ggml-quants.c.
_K_SCALE = (Plane(6, 4, 4),), (Plane(4, 12, 4), Plane(2, 4, 4, shift=6))
_K_MINIMUM = (Plane(6, 8, 4),), (Plane(4, 12, 4, shift=4), Plane(2, 8, 4, shift=6))
_FORMATS = (
    Format(2, group=32, offset=8, q=(Plane(4, 2, 16),)),
    Format(3, group=32, offset=0, q=(Plane(4, 4, 16),), m=2),
    Format(6, group=32, offset=16, q=(Plane(4, 6, 16), Plane(1, 2, 1))),
    Format(7, group=32, offset=0, q=(Plane(4, 8, 16), Plane(1, 4, 1)), m=2),
    Format(8, group=32, offset=128, q=(Plane(8, 2, 32, signed=True),)),
    Format(12, group=32, offset=0, q=(Plane(4, 16, 32),), m=2, scale=_K_SCALE, minimum=_K_MINIMUM),
    Format(
        13,
        group=32,
        offset=0,
        q=(Plane(4, 48, 32), Plane(1, 16, 32)),
        m=2,
        scale=_K_SCALE,
        minimum=_K_MINIMUM,
    ),
    Format(
        14, group=16, offset=32, q=(Plane(4, 0, 64), Plane(2, 128, 32)), d=208, scale=((Plane(8, 192, 16),),)
    ),
)
# Both by ggml's type id.
QUANTIZED: Mapping[int, Format] = {format.ggml_type: format for format in _FORMATS}
FLOATS = {0: dtypes.float32, 1: dtypes.float16, 30: dtypes.bfloat16}
