"""tinygrad 0.14.0 on CUDA: the compiler processes compile programs to machine code.

tinygrad makes CUDA's compiler stop at PTX. The driver then translates the PTX in the engine's process, one program
after the other under a lock: 3 seconds for a model's start on an H200, 50 ms for each candidate of a search. With this
fix the compiler emits machine code (a cubin) directly, as it does for tinygrad's NV device. If DEV names a chip that
the GPU stands in for, it stays PTX, which later chips run too.
"""

from __future__ import annotations

from typing import Any

from tinygrad.helpers import DEBUG, DEV
from tinygrad.renderer.cstyle import CUDARenderer

from engine.fixes import once

_stock_init = CUDARenderer.__init__


@once("Programs compiled to the end")
def apply() -> None:
    """Changes tinygrad in this process."""
    CUDARenderer.__init__ = _init


def _init(self: CUDARenderer, target: Any, use_nvcc: bool = False) -> None:
    _stock_init(self, target, use_nvcc)
    # tinygrad's mock GPU runs PTX, and DEBUG=5 prints it.
    takes_ptx = target.interface.startswith("MOCK") or DEBUG >= 5 or DEV.target("CUDA").arch
    if target.device == "CUDA" and not takes_ptx:
        self.compiler.ptx = False
        self.compiler.cachekey = f"{self.compiler.cachekey}_binary"
