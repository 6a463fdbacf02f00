"""tinygrad 0.14.0 on CUDA: a kernel can say that what it loads of some buffers is not read again soon.

A step reads each weight once, more bytes than the L2 cache holds, and everything else many times: vectors, sums, the
beginning of the next product's weights. With this fix, loads of the buffers that the hint `streams` names
(`engine.kernels.launch_hints`) ask the caches to drop these lines first (`__ldcs`; PTX ISA, "Cache Operators", .cs).
From compute capability 9.0 on, where it was timed.
"""

from __future__ import annotations

import re
from typing import Any

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, UOp

from engine.fixes import once
from engine.kernels.launch_hints import info_of

_MIN_CAPABILITY = 90
_KNOWN = re.compile(r"\*\(\((u?int[24]?|float[24]?|half2?)\*\)")  # types that the instruction has

_stock_render, _stock_access = CUDARenderer.render, CUDARenderer.render_access


@once("Loads that leave the caches first")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_render
    _stock_render = CUDARenderer.render  # another fix may have changed it since the import
    CUDARenderer.render, CUDARenderer.render_access = _render, _render_access


def _render(self: Any, uops: list[UOp]) -> str:
    info, arch = info_of(uops[-1]), re.match(r"sm_(\d+)", self.target.arch)
    is_timed = arch is not None and int(arch[1]) >= _MIN_CAPABILITY
    self.streamed = info.slots(info.hints.streams) if is_timed else frozenset()
    return str(_stock_render(self, uops))


def _render_access(self: Any, place: UOp) -> str:
    """An element of a buffer, or several, as C has it."""
    text, buffer = str(_stock_access(self, place)), place.buf_uop
    is_streamed = buffer.op is Ops.PARAM and buffer.arg.slot in self.streamed
    return f"__ldcs({text[1:]})" if is_streamed and _KNOWN.match(text) else text
