"""A sum over gathered rows is one kernel, which reads the rows where they lie."""

from unittest import mock

import numpy as np
import tinygrad.schedule.rangeify as rangeify
from tinygrad import Tensor
from tinygrad.helpers import GlobalCounters

from engine.fixes import fused_gathers


def kernels(size: int) -> int:
    """The kernels of a product of gathered rows of so many numbers, whose result is checked."""
    rng = np.random.default_rng(0)
    rows, x = rng.normal(size=(9, size)).astype(np.float32), rng.normal(size=(2, size)).astype(np.float32)
    places = [5, 2, 7]
    inputs = [Tensor(values).realize() for values in (rows, places, x)]
    before = GlobalCounters.kernel_count
    y = (inputs[0][inputs[1]] * inputs[2].unsqueeze(1)).sum(-1).realize()
    n = GlobalCounters.kernel_count - before
    np.testing.assert_allclose(y.numpy(), x @ rows[places].T, rtol=1e-4)
    return n


def test_a_sum_over_gathered_rows_is_one_kernel() -> None:
    fused_gathers.apply()
    assert kernels(64) == 1
    with mock.patch.object(rangeify, "pm_reduce_simplify", fused_gathers._stock):
        assert kernels(96) == 2
