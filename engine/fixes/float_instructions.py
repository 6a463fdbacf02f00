"""tinygrad 0.14.0 on NVIDIA GPUs: a maximum and a power of two of float32 numbers take one instruction each.

tinygrad writes a maximum as a comparison and a selection, which the compiler may not make one instruction of, since
they treat NaN differently. CUDA's exp2 scales denormal numbers up and down again, three more instructions. Both stand
in the inner loop of attention: in prefill they were a quarter of its instructions. With this fix a maximum is CUDA's
fmaxf, and a power of two is the instruction itself, which takes denormal numbers as zero (NVVM's intrinsic of PTX
ISA's `ex2.approx.ftz.f32`). The compiler's option --ftz would do that to every instruction, but quantized weights are
read as denormal numbers (`engine.targets.nvidia.kernels.weights.bit_packing`).
"""

from __future__ import annotations

from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops

from engine.fixes import once

_stock_power = CUDARenderer.code_for_op[Ops.EXP2]


@once("Instructions for float32")
def apply() -> None:
    """Changes tinygrad in this process."""
    CUDARenderer.code_for_op = {**CUDARenderer.code_for_op, Ops.MAX: _maximum, Ops.EXP2: _power_of_two}


def _maximum(a: str, b: str, dtype: DType) -> str:
    return f"fmaxf({a},{b})" if dtype == dtypes.float32 else f"(({a}<{b})?{b}:{a})"


def _power_of_two(a: str, dtype: DType) -> str:
    return f"__nvvm_ex2_approx_ftz_f({a})" if dtype == dtypes.float32 else _stock_power(a, dtype)
