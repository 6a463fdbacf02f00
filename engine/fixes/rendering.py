"""tinygrad 0.14.0 on CUDA: the place where other fixes change a kernel's operations, or what its renderer knows of it,
before it is written in CUDA C. tinygrad has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import UOp

from engine.kernels.launch_hints import HintedInfo, info_of

Change = Callable[[CUDARenderer, Sequence[UOp], HintedInfo], Sequence[UOp]]
"""Takes a kernel's operations, in their order, and what it says of its launch. Returns the operations to write, which
may be the same. What it sets of the renderer it sets for each kernel: the next one has the same renderer."""

_changes: list[Change] = []
_stock_render = CUDARenderer.render


def before_rendering(change: Change) -> None:
    """Has each kernel for CUDA changed before it is written, after what was told here before."""
    _changes.append(change)
    CUDARenderer.render = _render


def _render(self: CUDARenderer, uops: Sequence[UOp]) -> str:
    info = info_of(uops[-1])
    for change in _changes:
        uops = change(self, uops, info)
    return str(_stock_render(self, list(uops)))
