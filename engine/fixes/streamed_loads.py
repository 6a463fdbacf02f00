"""tinygrad 0.14.0 on CUDA: a kernel can say that what it loads of some buffers is not read again soon.

A step reads each weight once, more bytes than the L2 cache holds, and everything else many times: vectors, sums, the
beginning of the next product's weights. With this fix, loads of the buffers that the hint `streams` names
(`engine.kernels.launch_hints`) ask the caches to drop these lines first (`__ldcs`; PTX ISA, "Cache Operators", .cs).
From compute capability 9.0 on, where it was timed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, UOp

from engine.fixes import once
from engine.fixes.rendering import before_rendering
from engine.kernels.launch_hints import HintedInfo

_MIN_CAPABILITY = 90
_KNOWN = re.compile(r"\*\(\((u?int[24]?|float[24]?|half2?)\*\)")  # types that the instruction has

_stock_access = CUDARenderer.render_access


@once("Loads that leave the caches first")
def apply() -> None:
    """Changes tinygrad in this process."""
    before_rendering(_find_streams)
    CUDARenderer.render_access = _render_access


def _find_streams(renderer: Any, uops: Sequence[UOp], info: HintedInfo) -> Sequence[UOp]:
    arch = re.match(r"sm_(\d+)", renderer.target.arch)
    is_timed = arch is not None and int(arch[1]) >= _MIN_CAPABILITY
    renderer.streamed = info.slots(info.hints.streams) if is_timed else frozenset()
    return uops


def _render_access(self: Any, place: UOp) -> str:
    """An element of a buffer, or several, as C has it."""
    text, buffer = str(_stock_access(self, place)), place.buf_uop
    is_streamed = buffer.op is Ops.PARAM and buffer.arg.slot in self.streamed
    return f"__ldcs({text[1:]})" if is_streamed and _KNOWN.match(text) else text
