"""tinygrad 0.14.0 on CUDA: a kernel can ask for a minimum number of resident blocks for each multiprocessor.

The compiler may give a kernel so many registers that too few blocks fit on a multiprocessor to hide the latency of
memory. The second argument of CUDA's __launch_bounds__ says how many blocks must fit, but tinygrad writes only the
first. With this fix a kernel whose name ends in `_mbN` gets the bound N.
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
    _stock_render = CUDARenderer.render_kernel  # another fix may have changed it since the import
    CUDARenderer.render_kernel = _render


def _render(self: CUDARenderer, function_name: str, *args: Any, **kwargs: Any) -> str:
    source: str = _stock_render(self, function_name, *args, **kwargs)
    if minimum := re.search(r"_mb(\d+)$", function_name):
        return re.sub(r"__launch_bounds__\((\d+)\)", rf"__launch_bounds__(\1, {minimum[1]})", source)
    return source
