"""tinygrad 0.14.0 on CUDA: a kernel can ask for a minimum number of resident blocks for each multiprocessor.

The compiler may give a kernel so many registers that too few blocks fit on a multiprocessor to hide the latency of
memory. The second argument of CUDA's __launch_bounds__ says how many blocks must fit, but tinygrad writes only the
first. With this fix a kernel with the hint `min_blocks` (`engine.kernels.launch_hints`) gets the second.
"""

from __future__ import annotations

from typing import Any

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import UOp

from engine.fixes import once
from engine.kernels.launch_hints import hints_of

_stock_render = CUDARenderer.render


@once("Blocks per multiprocessor")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_render
    _stock_render = CUDARenderer.render  # another fix may have changed it since the import
    CUDARenderer.render = _render


def _render(self: Any, uops: list[UOp]) -> str:
    least = hints_of(uops[-1]).min_blocks
    if not least:
        return str(_stock_render(self, uops))
    self.kernel_typedef = type(self).kernel_typedef.replace("{launch_bounds}", f"{{launch_bounds}}, {least}")
    try:
        return str(_stock_render(self, uops))
    finally:
        del self.kernel_typedef
