"""tinygrad 0.14.0 on a CPU: a vector that a kernel loads whole stays whole.

The code generator takes every vector value apart into scalars and afterwards puts neighbouring loads and
stores together again, four at a time. The compiler's own vectorizer then keeps to groups of four as well: 128
bits, on a machine that has 512.

A kernel may say itself what a vector is: a load of `SHRINK(buffer, offset, n)` is n neighbouring elements.
With this fix, values computed element by element from such loads remain one value of n elements all the way
into the C source (`ext_vector_type(n)`), which the compiler maps to the registers that the machine has. In
such a kernel scalar loads are left alone too: one number for all lanes comes cheapest straight from memory.
Kernels without vector loads come out as before.

Comparisons and choices between vectors are taken apart as before, since C has no form for them; only the larger
of two values is one operation.

Kernels are compiled in processes of their own as well; those apply the fix when they start.
"""

from __future__ import annotations

from typing import Any

import tinygrad.codegen as codegen
import tinygrad.engine.worker as compile_workers
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.renderer.cstyle import ClangRenderer, base_rewrite
from tinygrad.uop.ops import GroupOp, Ops, PatternMatcher, UOp, UPat

from engine.fixes import once

_stock_devectorize = codegen.do_devectorize
_stock_coalescing = codegen.memory_coalescing
_stock_init_worker = compile_workers._init_worker
_WIDE = "__attribute__((min_vector_width(512)))"  # for some CPUs compilers prefer vectors of half the size


@once("Whole vectors on the CPU")
def apply() -> None:
    """Changes tinygrad in this process."""
    codegen.ew_devectorizer = _with_whole_vectors(codegen.ew_devectorizer)
    codegen.devectorizer2 = _with_whole_vectors(codegen.devectorizer2)
    codegen.memory_coalescing = _coalesce
    ClangRenderer.string_rewrite = _vector_forms + base_rewrite
    ClangRenderer.code_for_op = ClangRenderer.code_for_op | {Ops.MAX: _maximum}
    ClangRenderer.render_vector_prefix = _vector_type
    ClangRenderer.kernel_typedef = f"{_WIDE} {ClangRenderer.kernel_typedef}"
    compile_workers._init_worker = _init_worker


def _init_worker() -> None:
    apply()
    _stock_init_worker()


def _with_whole_vectors(matcher: PatternMatcher) -> PatternMatcher:
    return PatternMatcher([(p, _devectorize if f is _stock_devectorize else f) for p, f in matcher.patterns])


def _devectorize(b: UOp) -> UOp | None:  # matchers pass it by this name
    return None if _is_whole(b) else _stock_devectorize(b)


def _is_whole(value: UOp) -> bool:
    if value.op in (Ops.LOAD, Ops.STORE):
        return value.src[0].op is Ops.SHRINK
    return (
        len(value.shape) == 1
        and all(s._shape == value.shape and s.dtype != dtypes.bool for s in value.src)
        and value.dtype != dtypes.bool
        and any(s.op is Ops.LOAD or s.op in GroupOp.Elementwise or _is_shuffle(s) for s in value.src)
    )


def _is_shuffle(value: UOp) -> bool:
    """Whether a vector is put together from elements of vectors: picked by a vector of indices, or one by one."""
    element = value.src[0] if value.op is Ops.STACK else value
    return element.op is Ops.INDEX and len(element.src[0].shape) == 1 and element.addrspace is AddrSpace.ALU


def _coalesce(sink: UOp, renderer: Any) -> UOp:
    """Scalar loads and stores are not joined where a kernel has vectors of its own."""
    if any(u.op is Ops.SHRINK for u in sink.toposort()):
        return sink
    return _stock_coalescing(sink, renderer)


def _vector_cast(ctx: ClangRenderer, x: UOp) -> str | None:
    if x.max_numel() == 1 or x.addrspace in (AddrSpace.GLOBAL, AddrSpace.LOCAL):
        return None
    return f"__builtin_convertvector({ctx[x.src[0]]}, {ctx.render_type(x)})"


def _shuffle(ctx: ClangRenderer, x: UOp, v: UOp, at: UOp) -> str | None:
    if v.addrspace is not AddrSpace.ALU:
        return None
    elements = (f"{ctx[v]}[{i.src[0].val if i.op is Ops.CAST else i.val}]" for i in at.src)
    return f"({ctx.render_type(x)}){{{','.join(elements)}}}"


def _maximum(a: str, b: str, dtype: Any) -> str:
    return f"({a}|{b})" if dtype == dtypes.bool else f"__builtin_elementwise_max({a}, {b})"


_vector_forms = PatternMatcher(
    [
        (UPat(Ops.CAST, name="x"), _vector_cast),
        (UPat(Ops.INDEX, src=(UPat.var("v"), UPat(Ops.STACK, name="at")), name="x"), _shuffle),
    ]
)


def _vector_type(self: ClangRenderer, dtype: Any, count: int) -> str:
    """As aligned as one element: nothing promises more, and unaligned loads of aligned data cost nothing."""
    element, vector = (self._render_dtype(dtype, n, AddrSpace.REG) for n in (1, count))
    return f"typedef {element} {vector} __attribute__((aligned({dtype.itemsize}),ext_vector_type({count})));"
