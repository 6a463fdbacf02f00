"""tinygrad 0.14.0 on CUDA: how many blocks of a kernel a multiprocessor is to hold.

The compiler gives a kernel as many registers as it likes; too many, and too few blocks fit on a multiprocessor
to hide the latency of memory. CUDA's second launch bound says how many blocks must fit, but tinygrad writes the
first alone. With this fix a kernel whose name ends in `_mbN` is bound to N blocks.
"""

from __future__ import annotations

import re
from typing import Any

from tinygrad.renderer.cstyle import CUDARenderer

from engine.fixes import once

_stock_render = CUDARenderer.render_kernel


@once("Blocks per multiprocessor")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_render
    _stock_render = CUDARenderer.render_kernel  # as other changes have left it
    CUDARenderer.render_kernel = _render


def _render(self: CUDARenderer, function_name: str, *args: Any, **kwargs: Any) -> str:
    source: str = _stock_render(self, function_name, *args, **kwargs)
    if wanted := re.search(r"_mb(\d+)$", function_name):
        return re.sub(r"__launch_bounds__\((\d+)\)", rf"__launch_bounds__(\1, {wanted[1]})", source)
    return source
