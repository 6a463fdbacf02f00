"""Vector loads and stores of both kinds of steps, for a Jetson's GPU: that their addresses are aligned. A GPU has no
unaligned ones, and the blocks of quantized types have sizes like 210 bytes."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.processes import side_by_side

TYPES = ["Q6_K"]
if os.environ.get("ORIN_THOROUGH"):  # which takes minutes
    TYPES += ["Q5_1", "Q4_K", "Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q5_K", "F16", "BF16", "F32"]
nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="CUDA's compiler is not installed")


def python(*arguments, cache, renderer="NVCC"):
    env = {
        "DEV": f"NULL:{renderer}:sm_87",
        "NULL_ALLOW_COPYOUT": "1",
        "CACHELEVEL": "0",
        "PARALLEL": "0",
        "XDG_CACHE_HOME": str(cache),  # so that no kernel is known from another run
    }
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    def prove(path, renderer):
        cache = tmp_path_factory.mktemp("cache", numbered=True)
        return python("-m", "tests.kernels.gpu.alignment", path, *TYPES, cache=cache, renderer=renderer)

    with side_by_side(request, prove, "path", "renderer") as started:
        yield started


@pytest.mark.parametrize("renderer", [pytest.param("NVCC", marks=nvcc), "PTX"])
@pytest.mark.parametrize("path", ["fused", "graph"])
def test_every_vector_access_is_aligned(running, path, renderer):
    done = running[path, renderer].result()
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == TYPES
    assert all(int(kernels) and int(vectors) and int(wide) for _, kernels, vectors, wide in lines)


PROOF = """
import sys
from types import SimpleNamespace
from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops
from tests.kernels.gpu.alignment import prove_ptx, prove_uops, ptx
stride = int(sys.argv[1])
x = UOp.placeholder((1 << 20,), dtypes.float32, slot=0)
place = UOp(Ops.SHRINK, src=(x, UOp.special(64, "gidx0") * stride + 4, UOp.const(4)))
program = SimpleNamespace(arg=SimpleNamespace(name="t"), src=(None, SimpleNamespace(src=(place.load(),))))
source = '''extern "C" __global__ void __launch_bounds__(1) t(float* a, float* x) {
  float4 v = *((float4*)(x + blockIdx.x * STRIDE + 4));
  for (int i = 0; i < 9; i++) *((float4*)(a + (blockIdx.x + i) * STRIDE)) = v;
}'''
for prove in (lambda: prove_uops(program), lambda: prove_ptx(ptx([source.replace("STRIDE", str(stride))])[0])):
    try:
        print(prove() > 0)
    except AssertionError:
        print("unproven")
"""


@nvcc
@pytest.mark.parametrize("stride, found", [(8, "True"), (12, "True"), (210, "unproven"), (105, "unproven")])
def test_the_proof_fails_where_it_should(stride, found, tmp_path):
    done = python("-c", PROOF, str(stride), cache=tmp_path)
    assert done.stdout.split() == [found] * 2, done.stderr[-2000:]
