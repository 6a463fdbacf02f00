"""The schedule of matrix-vector products: found for what models compute, and not for what it does not suit."""

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.codegen.opt import OptOps, heuristic
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import CStyleLanguage

from engine.fixes import matvec_heuristic

ROWS, COLS = 512, 1024


class Gpu(CStyleLanguage):
    """Schedules as for a GPU; compiles nothing."""

    has_local = has_shared = True
    tensor_cores = ()

    def __init__(self, device):
        super().__init__(Target(device, "", "sm_87"))


def program(result):
    """What the last kernel of a tensor computes."""
    return result.schedule_linear().src[-1].src[0]


def schedule(program, device="CUDA"):
    kernel = Scheduler(program, Gpu(device))
    kernel.convert_loop_to_global()
    optimized = heuristic.hand_coded_optimizations(kernel)
    return {opt.op: opt.arg for opt in optimized.applied_opts}


@pytest.fixture
def weights():
    half = Tensor(np.ones((ROWS, COLS), np.float16)).realize()
    x = Tensor(np.ones((1, COLS), np.float32)).realize()
    return half, x, Tensor(np.ones(COLS, np.float32)).realize()


FORMS = {
    "half precision, summed in float": lambda w, x, n: x.half().matmul(w.T, dtype=dtypes.float32),
    "a norm's weight inside": lambda w, x, n: (x * n) @ w.T.float(),
    "scaled weights": lambda w, x, n: x @ (w.float() * w.flip(0).float()).T,
}


@pytest.mark.parametrize("form", FORMS)
def test_products_of_models_get_a_warp_a_row(form, weights, monkeypatch):
    result = program(FORMS[form](*weights))
    assert OptOps.GROUP not in schedule(result)  # without the fix
    monkeypatch.setattr(heuristic, "hand_coded_optimizations", matvec_heuristic._stock)  # restored afterwards
    matvec_heuristic.apply()
    assert schedule(result) == {OptOps.GROUP: 32, OptOps.LOCAL: 4, OptOps.UPCAST: 4}
    assert schedule(result, "AMD")[OptOps.GROUP] == 8


def test_other_kernels_are_left_to_tinygrad(weights, monkeypatch):
    w, x, _ = weights
    others = [w.float().sum(), x + 1, w.float().max(1), (w[:30].float() * x[:, ::2].repeat(1, 2)).sum(1)]
    others = [program(result) for result in others]
    before = [schedule(result) for result in others]
    monkeypatch.setattr(heuristic, "hand_coded_optimizations", matvec_heuristic._stock)
    matvec_heuristic.apply()
    assert [schedule(result) for result in others] == before
