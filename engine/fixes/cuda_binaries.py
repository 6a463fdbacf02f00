"""tinygrad 0.14.0 on CUDA: programs are compiled to the end by the processes that compile.

tinygrad has CUDA's compiler stop at PTX, which the driver then translates in the engine's own process, one program
after the other and under a lock: 3 seconds for a model's start on an H200, 50 ms for each candidate of a search.
With this fix the compiler makes the device's code at once, as tinygrad's NV device has it do.
"""

from __future__ import annotations

from typing import Any

from tinygrad.helpers import DEBUG
from tinygrad.renderer.cstyle import CUDARenderer

from engine.fixes import once

_stock_init = CUDARenderer.__init__


@once("Programs compiled to the end")
def apply() -> None:
    """Changes tinygrad in this process."""
    CUDARenderer.__init__ = _init


def _init(self: CUDARenderer, target: Any, use_nvcc: bool = False) -> None:
    _stock_init(self, target, use_nvcc)
    # Mock devices run PTX, and with DEBUG=5 tinygrad prints it.
    if target.device == "CUDA" and not target.interface.startswith("MOCK") and DEBUG < 5:
        self.compiler.ptx = False
        self.compiler.cachekey = f"{self.compiler.cachekey}_binary"
