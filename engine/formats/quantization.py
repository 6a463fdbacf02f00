"""GGUF quantization types, each described once: where a block holds its numbers, and what they mean.

Every type stores integers q of a few bits, in groups that share a scale and perhaps a minimum:

    w = factor * d * scale * (q - offset) - m * minimum

d and m are half precision, one of each in a block; MXFP4's d is a power of two. factor is a constant. scale and
minimum are small integers, one of each in a group; types without them have 1. The integers of a type with a codebook
are indices: T[q] takes the place of q. The kernels' own layouts are made of these numbers: from
`engine.kernels.fields`, or from `Plane.position`. Nothing here needs tinygrad: lists of models are made without it.

Block layouts: block_q4_0 to block_q6_K, block_iq4_nl, block_iq4_xs and block_mxfp4 in ggml/src/ggml-common.h of
llama.cpp, with the codebooks kvalues_iq4nl and kvalues_mxfp4. Meaning of the bits: the functions dequantize_row_* in
ggml/src/ggml-quants.c.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine.formats.ggml_types import OF_MEMORY, TYPES

if TYPE_CHECKING:
    from tinygrad import UOp

Index = TypeVar("Index", int, "UOp")


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


Planes = tuple[Plane, ...]  # of the same numbers, their lowest bits first


@dataclass(frozen=True)
class Format:
    """A quantization type. A group has `group` elements.

    `q`: the planes of its integers. `d` and `m`: the bytes where these begin. A type with m but without minima adds m
    instead of subtracting it. `scale` and `minimum`: the planes of the first numbers of a block, then those of as many
    more, if these lie elsewhere. Scales are signed if they have 8 bits, or if they are stored with a `scale_offset`.

    `codebook`: the integers that each q stands for. `exponent`: d is a byte e, and stands for 2**(e - 127); 0 stands
    for 0 instead of 2**-127."""

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
    factor: float = 1.0

    @property
    def name(self) -> str:
        return TYPES[self.ggml_type].name

    @property
    def block(self) -> int:
        """Elements of a block."""
        return TYPES[self.ggml_type].block

    @property
    def block_bytes(self) -> int:
        return TYPES[self.ggml_type].block_bytes

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


def unpacked_bytes(ggml_type: int, elements: int) -> int:
    """Bytes of so many elements, in whole blocks, in layouts whose small scales and minima are a byte each, or half a
    byte each (`Format.has_nibble_scales`)."""
    if not (format := FORMATS.get(ggml_type)):
        return elements * TYPES[ggml_type].block_bytes
    a_group = sum(name in format.scales for name in ("scale", "minimum")) - format.has_nibble_scales
    a_block = sum(name in format.scales for name in ("d", "m")) * (1 if format.exponent else 2)
    return (
        elements * sum(format.bits) // 8
        + elements // format.group * a_group
        + elements // format.block * a_block
    )


def packed_codes(codes: Sequence[int]) -> list[int]:
    """Numbers below 256, four in a 32-bit word, the first in the lowest bits."""
    return [int.from_bytes(bytes(codes[i : i + 4]), "little") for i in range(0, len(codes), 4)]


# Eight 6-bit scales and eight 6-bit minima in 12 bytes: get_scale_min_k4 in ggml-quants.c.
_K_SCALE = (Plane(6, 4, 4),), (Plane(4, 12, 4), Plane(2, 4, 4, shift=6))
_K_MINIMUM = (Plane(6, 8, 4),), (Plane(4, 12, 4, shift=4), Plane(2, 8, 4, shift=6))
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_FORMATS = (
    Format(2, group=32, offset=8, q=(Plane(4, 2, 16),)),
    Format(3, group=32, offset=0, q=(Plane(4, 4, 16),), m=2),
    Format(6, group=32, offset=16, q=(Plane(4, 6, 16), Plane(1, 2, 1))),
    Format(7, group=32, offset=0, q=(Plane(4, 8, 16), Plane(1, 4, 1)), m=2),
    Format(8, group=32, offset=128, q=(Plane(8, 2, 32, signed=True),)),
    Format(12, group=32, offset=0, q=(Plane(4, 16, 32),), m=2, scale=_K_SCALE, minimum=_K_MINIMUM),
    Format(13, group=32, offset=0, q=(Plane(4, 48, 32), Plane(1, 16, 32)), m=2, scale=_K_SCALE, minimum=_K_MINIMUM),
    Format(14, group=16, offset=32, q=(Plane(4, 0, 64), Plane(2, 128, 32)), d=208, scale=((Plane(8, 192, 16),),)),
    Format(39, group=32, offset=0, q=(Plane(4, 1, 16),), codebook=E2M1, exponent=True, factor=0.5),
    Format(20, group=32, offset=0, q=(Plane(4, 2, 16),), codebook=_IQ4),
    Format(23, group=32, offset=0, q=(Plane(4, 8, 16),), scale=((Plane(4, 4, 1), Plane(2, 2, 1)),), scale_offset=32,
           codebook=_IQ4),
    Format(11, group=16, offset=4, q=(Plane(2, 32, 32), Plane(1, 0, 32)), d=108,
           scale=((Plane(4, 96, 8), Plane(2, 104, 4)),), scale_offset=32),
    Format(10, group=16, offset=0, q=(Plane(2, 16, 32),), d=80, m=82, scale=((Plane(4, 0, 16),),),
           minimum=((Plane(4, 0, 16, shift=4),),)),
)  # fmt: skip
QUANTIZED: Mapping[int, Format] = {format.ggml_type: format for format in _FORMATS}
"""By ggml's type id: what most files hold."""

WIDENED_IQ1, WIDENED_IQ2, WIDENED_IQ3_XXS, WIDENED_IQ3_S, WIDENED_NVFP4 = OF_MEMORY
_wide_16 = partial(Format, group=16, offset=0, q=(Plane(4, 18, 128),), scale=((Plane(8, 2, 16),),))
_wide_32 = partial(Format, group=32, offset=0, q=(Plane(4, 10, 128),), scale=((Plane(8, 2, 8),),))
# Numbers of grids, in ascending order. Codes that are all bits apart stand for a number and minus it, so the first and
# the last of IQ2 are of no weight.
_WIDENED = (
    _wide_16(WIDENED_IQ1, codebook=(-9, -7, -1, 1, 7, 9), factor=1 / 8),
    _wide_16(WIDENED_IQ2, codebook=(-61, -43, -25, -8, 8, 25, 43, 61), factor=1 / 8),
    _wide_32(WIDENED_IQ3_XXS, factor=1 / 2,
           codebook=(-31, -26, -22, -18, -14, -10, -6, -2, 2, 6, 10, 14, 18, 22, 26, 31)),
    _wide_32(WIDENED_IQ3_S, codebook=tuple(range(-15, 16, 2))),
    Format(WIDENED_NVFP4, group=16, offset=0, q=(Plane(4, 6, 32),), scale=((Plane(8, 2, 4),),), factor=2.0**-11,
           codebook=E2M1),
    Format(35, group=32, offset=1, q=(Plane(2, 0, 32),), d=64),
    Format(42, group=32, offset=1, q=(Plane(2, 2, 1),)),
)  # fmt: skip
WIDENED: Mapping[int, Format] = {format.ggml_type: format for format in _WIDENED}
"""What `engine.formats.widening` makes of others; files have two of them too, TQ2_0 and Q2_0."""
FORMATS: Mapping[int, Format] = {**QUANTIZED, **WIDENED}
"""All that kernels read."""
FLOATS = (0, 1, 30)  # F32, F16 and BF16
WIDER: Mapping[int, int] = {
    16: WIDENED_IQ2, 17: WIDENED_IQ2, 18: WIDENED_IQ3_XXS, 19: WIDENED_IQ1, 21: WIDENED_IQ3_S, 22: WIDENED_IQ2,
    29: WIDENED_IQ1, 34: 35, 36: 35, 40: WIDENED_NVFP4, 41: 42,
}  # fmt: skip
"""Types of files that are read as others."""
READ_TYPES = (*FLOATS, *sorted(WIDER.keys() | {kind for kind in FORMATS if kind not in OF_MEMORY}))
"""The types of files that the engine runs."""


def read_as(ggml_type: int) -> int:
    """The type that a tensor of a file has when it is read."""
    return WIDER.get(ggml_type, ggml_type)
