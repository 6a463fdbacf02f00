"""GGUF quantization types, each described once: where a block holds its numbers, and what they mean.

Every type stores integers q of a few bits, in groups that share a scale and perhaps a minimum:

    w = d * scale * (q - offset) - m * minimum

d and m are half precision, one of each in a block; MXFP4's d is a power of two. scale and minimum are small integers,
one of each in a group; types without them have 1. The integers of a type with a codebook are indices: T[q] takes the
place of q. The kernels' own layouts are made of these numbers: from `Format.fields`, or from `Plane.position`.

Block layouts: block_q4_0 to block_q6_K, block_iq4_nl, block_iq4_xs and block_mxfp4 in ggml/src/ggml-common.h of
llama.cpp, with the codebooks kvalues_iq4nl and kvalues_mxfp4. Meaning of the bits: the functions dequantize_row_* in
ggml/src/ggml-quants.c.
"""

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
    """The numbers in n blocks: `q` uint8 (n, block); `d` and `m` float16 (n, 1), or `d` uint8 for an exponent; `scale`
    and `minimum` int8 or uint8 (n, block / group). `scale` and `minimum` None stand for 1, `m` None for 0."""

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
    more, if these lie elsewhere. Scales are signed if they have 8 bits, or if they are stored with a `scale_offset`.

    `codebook`: the integers that each q stands for. `exponent`: d is a byte e, and stands for 2**(e - 128); 0 stands
    for 0 instead of 2**-128."""

    ggml_type: int
    group: int
    offset: int
    q: Planes
    d: int = 0
    m: int | None = None
    scale: tuple[Planes, ...] = ()
    minimum: tuple[Planes, ...] = ()
    scale_offset: int = 0
    codebook: tuple[int, ...] = ()
    exponent: bool = False

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

    @property
    def has_nibble_scales(self) -> bool:
        """Whether a scale and a minimum of 4 bits each share a byte (Q2_K), also in the layouts of kernels."""
        return bool(self.minimum) and self.minimum[0][0].bits == self.scale[0][0].bits == 4

    @property
    def codes(self) -> tuple[int, ...]:
        """The codebook with `code_offset` added, so that no number is negative."""
        return tuple(value + self.code_offset for value in self.codebook)

    @property
    def code_offset(self) -> int:
        return -min(self.codebook)

    def values(self, q: Tensor) -> Tensor:
        """The numbers that the integers q stand for, float32 of the same shape: q - offset, or T[q]."""
        if not self.codebook:
            return q.cast(dtypes.float32) - self.offset
        four = [Tensor(word, dtype=dtypes.uint32, device=q.device) for word in packed_codes(self.codes)]
        word = (q < 8).where((q < 4).where(four[0], four[1]), (q < 12).where(four[2], four[3]))
        codes = (word >> ((q & 3) * 8).cast(dtypes.uint32)) & 255
        return codes.cast(dtypes.float32) - self.code_offset

    def factors(self, d: Tensor) -> Tensor:
        """d as float32, of the same shape."""
        if not self.exponent:
            return d.cast(dtypes.float32)
        return (d.cast(dtypes.uint32) << 23).bitcast(dtypes.float32) * 0.5

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
        elif scale is not None and self.scale_offset:
            scale = scale.cast(dtypes.int8) - self.scale_offset
        m = None if self.m is None else half(self.m) if self.minimum else -half(self.m)
        d = blocks[:, self.d : self.d + 1] if self.exponent else half(self.d)
        return Fields(_joined(self.q, blocks, self.block), d, scale, m, minimum)


def packed_codes(codes: Sequence[int]) -> list[int]:
    """Numbers below 256, four in a 32-bit word, the first in the lowest bits."""
    return [int.from_bytes(bytes(codes[i : i + 4]), "little") for i in range(0, len(codes), 4)]


def _joined(planes: Planes, blocks: Tensor, n: int) -> Tensor:
    """n numbers of each block, uint8 (blocks, n)."""
    value, low = planes[0].read(blocks, n), planes[0].bits
    for plane in planes[1:]:
        value, low = value | (plane.read(blocks, n) << low), low + plane.bits
    return value


# Eight 6-bit scales and eight 6-bit minima in 12 bytes: get_scale_min_k4 in ggml-quants.c.
_K_SCALE = (Plane(6, 4, 4),), (Plane(4, 12, 4), Plane(2, 4, 4, shift=6))
_K_MINIMUM = (Plane(6, 8, 4),), (Plane(4, 12, 4, shift=4), Plane(2, 8, 4, shift=6))
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    0,
    -1,
    -2,
    -3,
    -4,
    -6,
    -8,
    -12,
)  # doubled: d is a half of the block's power of two
_FORMATS = (
    Format(2, group=32, offset=8, q=(Plane(4, 2, 16),)),
    Format(3, group=32, offset=0, q=(Plane(4, 4, 16),), m=2),
    Format(6, group=32, offset=16, q=(Plane(4, 6, 16), Plane(1, 2, 1))),
    Format(7, group=32, offset=0, q=(Plane(4, 8, 16), Plane(1, 4, 1)), m=2),
    Format(8, group=32, offset=128, q=(Plane(8, 2, 32, signed=True),)),
    Format(12, group=32, offset=0, q=(Plane(4, 16, 32),), m=2, scale=_K_SCALE, minimum=_K_MINIMUM),
    Format(13, group=32, offset=0, q=(Plane(4, 48, 32), Plane(1, 16, 32)), m=2, scale=_K_SCALE, minimum=_K_MINIMUM),
    Format(14, group=16, offset=32, q=(Plane(4, 0, 64), Plane(2, 128, 32)), d=208, scale=((Plane(8, 192, 16),),)),
    Format(39, group=32, offset=0, q=(Plane(4, 1, 16),), codebook=_E2M1, exponent=True),
    Format(20, group=32, offset=0, q=(Plane(4, 2, 16),), codebook=_IQ4),
    Format(23, group=32, offset=0, q=(Plane(4, 8, 16),), scale=((Plane(4, 4, 1), Plane(2, 2, 1)),), scale_offset=32,
           codebook=_IQ4),
    Format(11, group=16, offset=4, q=(Plane(2, 32, 32), Plane(1, 0, 32)), d=108,
           scale=((Plane(4, 96, 8), Plane(2, 104, 4)),), scale_offset=32),
    Format(10, group=16, offset=0, q=(Plane(2, 16, 32),), d=80, m=82, scale=((Plane(4, 0, 16),),),
           minimum=((Plane(4, 0, 16, shift=4),),)),
)  # fmt: skip
# Both by ggml's type id.
QUANTIZED: Mapping[int, Format] = {format.ggml_type: format for format in _FORMATS}
FLOATS = {0: dtypes.float32, 1: dtypes.float16, 30: dtypes.bfloat16}
