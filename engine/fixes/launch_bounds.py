"""tinygrad 0.14.0 on CUDA: a kernel can ask for a minimum number of resident blocks for each multiprocessor.

The compiler may give a kernel so many registers that too few blocks fit on a multiprocessor to hide the latency of
memory. The second argument of CUDA's __launch_bounds__ says how many blocks must fit, but tinygrad writes only the
first. With this fix a kernel with the hint `min_blocks` (`engine.kernels.launch_hints`) gets the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import UOp

from engine.fixes import once
from engine.fixes.rendering import before_rendering
from engine.kernels.launch_hints import HintedInfo


@once("Blocks per multiprocessor")
def apply() -> None:
    """Changes tinygrad in this process."""
    before_rendering(_bound)


def _bound(renderer: CUDARenderer, uops: Sequence[UOp], info: HintedInfo) -> Sequence[UOp]:
    stock, least = type(renderer).kernel_typedef, info.hints.min_blocks
    bounds = f"{{launch_bounds}}, {least}" if least else "{launch_bounds}"
    renderer.kernel_typedef = stock.replace("{launch_bounds}", bounds)
    return uops
