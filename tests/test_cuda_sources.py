"""Sources of kernels that NVIDIA's compiler refuses, which the simulated GPU's would take."""

import pytest

from tests.cuda_sources import refused

KERNEL = """typedef unsigned int uint;
{}extern "C" __global__ void __launch_bounds__(64) k(float* data0_64) {{
  int lidx0 = threadIdx.x; /* 64 */
  {}
}}"""


@pytest.mark.parametrize(
    "include, body, why",
    [
        ("", "*(data0_64+lidx0) = rsqrtf((*data0_64)+1.0f);", ""),
        ("#include <cuda_fp16.h>\n", "half2 val0 = *((half2*)(data0_64));", ""),
        ("", 'asm volatile("griddepcontrol.wait;" ::: "memory");', ""),
        ("", "float alu0 = rsqrtf(make_float((*data0_64)));", "no make_float"),
        ("", "*((unsigned_char4*)(data0_64)) = 0;", "no unsigned_char4"),
        ("", "half val0 = *((half*)(data0_64));", "cuda_fp16.h is not included"),
        ("#include <cuda_fp16.h>\n", "nv_bfloat16 val0 = *((nv_bfloat16*)(data0_64));", "cuda_bf16.h is not"),
        ("", "int lidx1 = threadIdx.y; /* 32 */", "2048 threads"),
    ],
)
def test_what_cuda_does_not_take_is_refused(include, body, why):
    said = refused(KERNEL.format(include, body))
    assert why in said if why else not said
