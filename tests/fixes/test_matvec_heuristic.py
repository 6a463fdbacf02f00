"""The schedule of matrix-vector products: found for what models compute, and not for what it does not suit."""

import numpy as np
import pytest
from tinygrad import Tensor, UOp, dtypes
from tinygrad.codegen.opt import OptOps, heuristic
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.helpers import Target, getenv
from tinygrad.renderer.cstyle import CStyleLanguage

from engine import fixes
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
    "loads three products and casts down": lambda w, x, n: (x * (n * (n * x)).half().float()) @ w.T.float(),
}


@pytest.mark.parametrize("form", FORMS)
def test_products_of_models_get_a_warp_a_row(form, weights, monkeypatch):
    result = program(FORMS[form](*weights))
    monkeypatch.setattr(heuristic, "hand_coded_optimizations", matvec_heuristic._stock)  # restored afterwards
    monkeypatch.setattr(fixes, "_applied", [])
    assert OptOps.GROUP not in schedule(result)  # without the fix
    matvec_heuristic.apply()
    assert schedule(result) == {OptOps.GROUP: 32, OptOps.LOCAL: 4, OptOps.UPCAST: 4}
    assert schedule(result, "NV")[OptOps.GROUP] == 32
    assert schedule(result, "AMD")[OptOps.GROUP] == 8
    monkeypatch.setenv("MV_THREADS_PER_ROW", "16")  # the user's word counts
    getenv.cache_clear()
    assert schedule(result)[OptOps.GROUP] == 16
    getenv.cache_clear()


def test_loads_beyond_the_depth_are_not_looked_for():
    x = UOp.placeholder((8,), dtypes.float32, slot=0).index(UOp.const(0))
    product = x * x
    for _ in range(matvec_heuristic.DEPTH):
        product = (product.cast(dtypes.float16).cast(dtypes.float32)) * x
    assert len(matvec_heuristic._loads(product, matvec_heuristic.DEPTH + 1)) == matvec_heuristic.DEPTH + 2
    deeper = matvec_heuristic._loads(product * x, matvec_heuristic.DEPTH + 1)
    assert len(deeper) == matvec_heuristic.DEPTH + 1  # the innermost two are out of reach


def test_other_kernels_are_left_to_tinygrad(weights, monkeypatch):
    w, x, _ = weights
    others = [w.float().sum(), x + 1, w.float().max(1), (w[:30].float() * x[:, ::2].repeat(1, 2)).sum(1)]
    others = [program(result) for result in others]
    before = [schedule(result) for result in others]
    monkeypatch.setattr(heuristic, "hand_coded_optimizations", matvec_heuristic._stock)
    monkeypatch.setattr(fixes, "_applied", [])
    matvec_heuristic.apply()
    assert [schedule(result) for result in others] == before
