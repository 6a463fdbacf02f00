"""The proofs of alignment fail where an address is not aligned, or is not known to be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

from tests.kernels.gpu.alignment import prove_ptx, prove_uops

STRIDES = {8: True, 12: True, 210: False, 105: False}  # elements of 4 bytes, loaded and stored four at a time
KERNEL = """\
extern "C" __global__ void __launch_bounds__(1) t_STRIDE(float* a, float* x) {
  float4 v = *((float4*)(x + blockIdx.x * STRIDE + 4));
  for (int i = 0; i < 9; i++) *((float4*)(a + (blockIdx.x + i) * STRIDE)) = v;
}
"""


def is_proven(prove, kernel) -> bool:
    try:
        return prove(kernel) > 0
    except AssertionError:
        return False


@pytest.mark.parametrize("stride", STRIDES)
def test_of_uops(stride: int) -> None:
    x = UOp.placeholder((1 << 20,), dtypes.float32, slot=0)
    place = UOp(Ops.SHRINK, src=(x, UOp.special(64, "gidx0") * stride + 4, UOp.const(4)))
    program = SimpleNamespace(arg=SimpleNamespace(name="t"), src=(None, SimpleNamespace(src=(place.load(),))))
    assert is_proven(prove_uops, program) is STRIDES[stride]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="CUDA's compiler is not installed")
def test_of_ptx(tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text("".join(KERNEL.replace("STRIDE", str(stride)) for stride in STRIDES))
    command = ["nvcc", "-arch=sm_87", "-ptx", str(source), "-o", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    kernels = {
        int(kernel.partition("(")[0].rpartition("_")[2]): kernel for kernel in text.split(".entry")[1:]
    }
    assert {stride: is_proven(prove_ptx, kernel) for stride, kernel in kernels.items()} == STRIDES
