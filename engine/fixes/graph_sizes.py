"""tinygrad 0.14.0 on CUDA: a graph can have kernels whose number of blocks follows from a variable alone.

tinygrad makes a graph with variables of 0, and each launch sets the true sizes. CUDA takes no kernel of 0 blocks, also
not until then ("invalid argument"). With this fix such a kernel has 1 block until the first launch. Without it no model
ran as tensor graphs on CUDA: the keys and values that a step stores in a block of the cache are as many as a variable
says.
"""

from __future__ import annotations

from typing import Any

from tinygrad.runtime.autogen import cuda

from engine.fixes import once

_stock_params: Any = cuda.CUDA_KERNEL_NODE_PARAMS_v1


@once("Sizes of graphs")
def apply() -> None:
    """Changes tinygrad in this process."""
    cuda.CUDA_KERNEL_NODE_PARAMS_v1 = _params


def _params(function: Any, *given: Any) -> Any:
    """In the place of CUDA_KERNEL_NODE_PARAMS_v1, which only graphs that are being made use. `given`: three sizes of
    the grid, three of a block, and more."""
    return _stock_params(function, *(max(size, 1) for size in given[:6]), *given[6:])
