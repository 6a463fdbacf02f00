"""Words that hold two float16, the first in the lower bits.

An instruction of a GPU computes with both halves of a register, and tensor cores take registers of two. Compilers do
not see that halves which were taken apart are only put together again, or that two of them are multiplied alike. So on
CUDA its own functions say it; on other devices the same is written in UOps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops

from engine.kernels.target import renderer
from engine.targets.nvidia.kernels.uops import F16, INDEX, U32, bitwise_or, mask, shift, u32

_BASE_BITS, _BASE = 0x6400, 1024.0  # a float16 whose lowest bits count ones


def is_cuda() -> bool:
    """Whether kernels are written in CUDA's language."""
    return isinstance(renderer(), CUDARenderer)


def halves(word: UOp) -> list[UOp]:
    """The two float16 of a word."""
    if is_cuda():
        return [_call(F16, name, word) for name in ("__low2half", "__high2half")]
    return [mask(shift(word, by), 0xFFFF).cast(dtypes.uint16).bitcast(F16) for by in (0, 16)]


def word_of(low: UOp, high: UOp) -> UOp:
    """The word of two float16."""
    if is_cuda():
        return UOp(Ops.CUSTOM, U32, (low, high), "tg_bitcast<uint>(__halves2half2({0}, {1}))")
    bits = [x.bitcast(dtypes.uint16).cast(U32) for x in (low, high)]
    return bitwise_or([bits[0], shift(bits[1], -16)])


def rounded(low: UOp, high: UOp) -> UOp:
    """The word of two float32, rounded to float16. Only for CUDA."""
    return UOp(Ops.CUSTOM, U32, (low, high), "tg_bitcast<uint>(__floats2half2_rn({0}, {1}))")


def pairwise(function: str, *words: UOp) -> UOp:
    """The word that one of CUDA's functions of pairs of float16 makes of words. Only for CUDA."""
    return _call(U32, function, *words)


def product(a: Sequence[UOp], b: Sequence[UOp]) -> list[UOp]:
    """The products of two float16 with two others."""
    if is_cuda():
        return halves(pairwise("__hmul2", word_of(*a), word_of(*b)))
    return [x * y for x, y in zip(a, b, strict=True)]


def chosen_bytes(a: UOp, b: UOp, places: Sequence[int]) -> UOp:
    """The word of four bytes, the lowest first: 0 to 3 are places in `a`, 4 to 7 places in `b`."""
    if is_cuda():
        selector = sum(place << (4 * k) for k, place in enumerate(places))
        return UOp(Ops.CUSTOM, U32, (a, b), f"__byte_perm({{0}}, {{1}}, {selector:#x})")
    own = (shift((a, b)[place // 4], 8 * (place % 4)) for place in places)
    return bitwise_or([shift(mask(x, 0xFF), -8 * k) for k, x in enumerate(own)])


def unknown(index: UOp) -> UOp:
    """An index of which the compiler knows no bits. Otherwise CUDA's makes bitwise or of the addition of constants, and
    each load computes its address with two instructions, where the addition would be part of the load."""
    return chosen_bytes(index.cast(U32), u32(0), range(4)).cast(INDEX) if is_cuda() else index


def picked_bytes(a: UOp, b: UOp, places: UOp) -> UOp:
    """As `chosen_bytes`, by the lowest four numbers of 4 bits of the word `places`. A number from 8 on picks the sign
    of the byte that is eight places before, in all bits (PTX ISA, prmt). Only for CUDA."""
    return UOp(Ops.CUSTOM, U32, (a, b, places), "__nvvm_prmt({0}, {1}, {2})")


def kept(constant: UOp) -> UOp:
    """A word that stays in a register of each thread. Otherwise CUDA's compiler keeps a constant where all threads of a
    warp read it, and moves it to a register for each use. Only for CUDA, and for blocks of two dimensions."""
    return UOp(Ops.CUSTOM, U32, (constant,), "({0} ^ threadIdx.z)")


def integers(word: UOp, places: Sequence[int], offset: int) -> list[UOp]:
    """The bytes of a word at an even number of places, less `offset`, as float16. A byte becomes one without a
    conversion: it goes to the lowest bits of 1024."""
    if not is_cuda():
        whole = (bitwise_or([mask(shift(word, 8 * place), 0xFF), u32(_BASE_BITS)]) for place in places)
        less = UOp.const(_BASE + offset, F16)
        return [x.cast(dtypes.uint16).bitcast(F16) - less for x in whole]
    base, pairs = u32(_BASE_BITS << 16 | _BASE_BITS), zip(places[::2], places[1::2], strict=True)
    enlarged = [chosen_bytes(word, base, (low, 5, high, 5)) for low, high in pairs]
    return [
        x
        for pair in enlarged
        for x in halves(pairwise("__hsub2", pair, constants(_BASE + offset, _BASE + offset)))
    ]


def constants(low: float, high: float) -> UOp:
    """The word of two constants."""
    return u32(int(np.array([low, high], np.float16).view(np.uint32)[0]))


def _call(dtype: DType, function: str, *words: UOp) -> UOp:
    arguments = ", ".join(f"tg_bitcast<__half2>({{{i}}})" for i in range(len(words)))
    call = f"{function}({arguments})"
    return UOp(Ops.CUSTOM, dtype, words, f"tg_bitcast<uint>({call})" if dtype == U32 else call)
