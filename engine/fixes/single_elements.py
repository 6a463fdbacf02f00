"""tinygrad 0.14.0 on CUDA: a vector of one element is written as that element.

tinygrad makes a number of a reduction's result by a vector of one element where it knows the operation that reads it.
An instruction by name (`Ops.CUSTOM`) it does not know, and writes the vector as a call of `make_float`, which CUDA does
not have: prompts of OLMoE and OLMo 2, whose queries are normed over all heads, did not compile.
"""

from __future__ import annotations

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

from engine.fixes import once


@once("Vectors of one element")
def apply() -> None:
    """Changes tinygrad in this process."""
    element = PatternMatcher([(UPat(Ops.STACK, src=(UPat.var("only"),)), _element)])
    CUDARenderer.string_rewrite = element + CUDARenderer.string_rewrite


def _element(ctx: CUDARenderer, only: UOp) -> str:
    return str(ctx[only])
