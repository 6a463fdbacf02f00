"""tinygrad 0.14.0 on CUDA: products that the four warps of a warpgroup compute together, on GPUs of compute capability
9.0.

tinygrad knows the tensor cores' instruction of one warp, which reaches two thirds of what such a GPU computes, and
takes both operands from registers. That of a warpgroup (PTX ISA, "wgmma") takes one of them from shared memory, where
it is read once for 64 rows of the other, and goes on while the warps do something else. Each operation here is one
instruction, put into a kernel's graph as Ops.CUSTOM. They are effects, which the graph orders by their sources.

The instruction is of the target "sm_90a" alone. With this fix tinygrad compiles kernels that have it for that target,
and their arrays in shared memory begin where what it reads has to begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp, dtypes
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler
from tinygrad.uop.ops import Ops

from engine.fixes import once

CAPABILITY = "sm_90"
"""The only one with the instruction."""
WARPS = 4  # of a group
ROWS, DEPTH = 64, 16  # of the left operand, and the common dimension

_ATOM = 1024  # bytes of eight columns
_LAYOUT = 1 << 62 | _ATOM >> 4 << 32 | 1 << 16  # PTX ISA, "Matrix Descriptor Format": of 128 bytes, swizzled

_FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
_CLOSE = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
_WAIT = 'asm volatile("wgmma.wait_group.sync.aligned {n};" ::: "memory");'
_SHOW = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'

_SHARED = "__shared__ __align__({})"
_stock_compile = NVRTCCompiler.compile


@once("Products of warpgroups")
def apply() -> None:
    """Changes tinygrad in this process."""
    NVRTCCompiler.compile = _compile


def _compile(self: NVRTCCompiler, source: str) -> bytes:
    if "wgmma." not in source or self.arch != CAPABILITY:
        return bytes(_stock_compile(self, source))
    stock = self.compile_options
    self.compile_options = [option.replace(CAPABILITY, f"{CAPABILITY}a") for option in stock]
    try:
        return bytes(_stock_compile(self, source.replace(_SHARED.format(16), _SHARED.format(_ATOM))))
    finally:
        self.compile_options = stock


def shown(*before: UOp) -> UOp:
    """Lets the products see what the thread has written to shared memory before; of other threads, after a barrier."""
    return UOp(Ops.CUSTOM, dtypes.void, before, _SHOW)


def begun(*before: UOp) -> UOp:
    """What comes before the first of some products: registers that they take may have been written."""
    return UOp(Ops.CUSTOM, dtypes.void, before, _FENCE)


def added(sums: Sequence[UOp], left: Sequence[UOp], right: UOp, *after: UOp) -> UOp:
    """Adds a product of 64 x 16 by 16 x n to `sums`, elements of registers, n / 2 of a thread: for each eight columns
    the four that mma.m16n8k16 has of a warp's 16 rows. `left`: the thread's four words of these rows, as that one has
    them. `right`: the first element of the other operand, float16, in an array in shared memory where each column has
    128 bytes, 64 of the common dimension. The k-th 16 bytes of column c lie at place k ^ c % 8, so that those of eight
    columns are in all banks."""
    described = _described(len(sums) + 4)
    n, words = len(sums), [f'"r"({{{len(sums) + i}}})' for i in range(4)]
    inputs = ", ".join(f"%{n + i}" for i in range(4))
    operands = [*words, f'"l"({described})']
    return _product(sums, (*left, right), f"{{{{{inputs}}}}}, %{n + 4}, p, 1, 1, 0", operands, after)


def added_shared(sums: Sequence[UOp], left: UOp, right: UOp, *after: UOp) -> UOp:
    """As `added`, with the left operand in shared memory too: `left` is its first element, and its rows lie there as
    the columns of the right one do."""
    n = len(sums)
    operands = [f'"l"({_described(n + i)})' for i in (0, 1)]
    # tinygrad includes the header of halves where a value is one, not for an address.
    return _product(
        sums, (left, right, UOp.const(0, dtypes.float16)), f"%{n}, %{n + 1}, p, 1, 1, 0, 0", operands, after
    )


def _described(place: int) -> str:
    """How the instruction is told of an operand in shared memory, the source of that number."""
    return f"(unsigned long long)((uint)__cvta_generic_to_shared({{{place}}}) >> 4) | {_LAYOUT:#x}ull"


def _product(
    sums: Sequence[UOp], taken: Sequence[UOp], inputs: str, operands: Sequence[str], after: Sequence[UOp]
) -> UOp:
    n = len(sums)
    outs = ", ".join(f"%{i}" for i in range(n))
    text = (
        f'asm volatile("{{{{ .reg .pred p; setp.eq.u32 p, 1, 1; '
        f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.f16.f16 "
        f'{{{{{outs}}}}}, {inputs}; }}}}" : '
        + ", ".join(f'"+f"(*{{{i}}})' for i in range(n))
        + f' : {", ".join(operands)} : "memory");'
    )
    return UOp(Ops.CUSTOM, dtypes.void, (*sums, *taken, *after), text)


def closed(*products: UOp) -> UOp:
    """Ends the products that were begun; they may still compute."""
    return UOp(Ops.CUSTOM, dtypes.void, products, _CLOSE)


def all_but(n: int, *closed: UOp) -> UOp:
    """Waits for all products that the warpgroup has closed but the latest n."""
    return UOp(Ops.CUSTOM, dtypes.void, closed, _WAIT.replace("{n}", str(n)))


def after(word: UOp, effect: UOp) -> UOp:
    """A word, as it is after an effect: what is made of it is made then."""
    return UOp(Ops.CUSTOM, word.dtype, (word, effect), "{0}")
