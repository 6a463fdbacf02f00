"""tinygrad 0.14.0 on a CPU: explicit vectors stay vectors all the way into the C source.

The code generator splits every vector value into scalars and then joins neighbouring loads and stores again, four at a
time. The C compiler's vectorizer keeps these groups of four: 128 bits, even on a machine that has 512.

A kernel can state its vectors: a load of `SHRINK(buffer, offset, n)` reads n neighbouring elements. With this fix,
values computed element by element from such loads remain one value of n elements in the C source
(`ext_vector_type(n)`), and the compiler maps it to the machine's registers. In such a kernel scalar loads are not
joined either: a broadcast of one number is cheapest straight from memory. Kernels without vector loads are unchanged.

Vector comparisons and selections are still split, because tinygrad's C has no form for them; only the maximum of two
vectors is one operation.
"""

from __future__ import annotations

from typing import Any

import tinygrad.codegen as codegen
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.renderer.cstyle import ClangRenderer, base_rewrite
from tinygrad.uop.ops import GroupOp, Ops, PatternMatcher, UOp, UPat

from engine.fixes import once

_stock_devectorize = codegen.do_devectorize
_stock_coalescing = codegen.memory_coalescing
_WIDE = "__attribute__((min_vector_width(512)))"  # for some CPUs compilers prefer 256 bits even if 512 exist


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


def _with_whole_vectors(matcher: PatternMatcher) -> PatternMatcher:
    return PatternMatcher([(p, _devectorize if f is _stock_devectorize else f) for p, f in matcher.patterns])


def _devectorize(b: UOp) -> UOp | None:  # pattern matchers pass the value by this name
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
    """Whether a value permutes elements of vectors: indexed by a vector, or stacked from single elements."""
    element = value.src[0] if value.op is Ops.STACK else value
    return element.op is Ops.INDEX and len(element.src[0].shape) == 1 and _is_value(element)


def _is_value(value: UOp) -> bool:
    """Whether it is computed, or constant, and no place in memory."""
    return value.addrspace in (AddrSpace.ALU, None)


def _coalesce(sink: UOp, renderer: Any) -> UOp:
    """Does not join scalar loads and stores in a kernel with explicit vectors."""
    if any(u.op is Ops.SHRINK for u in sink.toposort()):
        return sink
    return _stock_coalescing(sink, renderer)


def _vector_cast(ctx: ClangRenderer, x: UOp) -> str | None:
    if x.max_numel() == 1 or x.addrspace in (AddrSpace.GLOBAL, AddrSpace.LOCAL):
        return None
    return f"__builtin_convertvector({ctx[x.src[0]]}, {ctx.render_type(x)})"


def _shuffle(ctx: ClangRenderer, x: UOp, v: UOp, at: UOp) -> str | None:
    if not _is_value(v):
        return None
    elements = (f"{ctx[v]}[{_place(ctx, i)}]" for i in at.src)
    return f"({ctx.render_type(x)}){{{','.join(elements)}}}"


def _place(ctx: ClangRenderer, at: UOp) -> str | int:
    number = at.src[0] if at.op is Ops.CAST else at
    return int(number.val) if number.op is Ops.CONST else ctx[at]


def _maximum(a: str, b: str, dtype: Any) -> str:
    return f"({a}|{b})" if dtype == dtypes.bool else f"__builtin_elementwise_max({a}, {b})"


_vector_forms = PatternMatcher(
    [
        (UPat(Ops.CAST, name="x"), _vector_cast),
        (UPat(Ops.INDEX, src=(UPat.var("v"), UPat(Ops.STACK, name="at")), name="x"), _shuffle),
    ]
)


def _vector_type(self: ClangRenderer, dtype: Any, count: int) -> str:
    """Declares a vector type aligned as one element: kernels promise no more, and unaligned load instructions cost
    nothing on data that happens to be aligned."""
    element, vector = (self._render_dtype(dtype, n, AddrSpace.REG) for n in (1, count))
    return f"typedef {element} {vector} __attribute__((aligned({dtype.itemsize}),ext_vector_type({count})));"
