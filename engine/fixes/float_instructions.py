"""tinygrad 0.14.0 on NVIDIA GPUs: a maximum and a power of two of float32 numbers take one instruction each.

tinygrad writes a maximum as a comparison and a selection, which the compiler may not make one instruction of, since
they treat NaN differently. CUDA's exp2 scales denormal numbers up and down again, three more instructions, unless
denormal numbers are flushed to zero. Both stand in the inner loop of attention: in prefill they were a quarter of its
instructions. With this fix a maximum is CUDA's fmaxf, and the runtime compiler flushes denormal float32 numbers to zero
(its option --ftz).
"""

from __future__ import annotations

from typing import Any

from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler
from tinygrad.uop.ops import Ops

from engine.fixes import once

_stock_init = NVRTCCompiler.__init__


@once("Instructions for float32")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_init
    _stock_init = NVRTCCompiler.__init__  # another fix may have changed it since the import
    NVRTCCompiler.__init__ = _init
    CUDARenderer.code_for_op = {**CUDARenderer.code_for_op, Ops.MAX: _maximum}


def _init(self: NVRTCCompiler, *args: Any, **options: Any) -> None:
    _stock_init(self, *args, **options)
    self.compile_options.append("--ftz=true")
    self.cachekey = f"{self.cachekey}_ftz"


def _maximum(a: str, b: str, dtype: DType) -> str:
    return f"fmaxf({a},{b})" if dtype == dtypes.float32 else f"(({a}<{b})?{b}:{a})"
