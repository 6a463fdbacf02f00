"""The order of a head's elements: pairs half a head apart, whatever the file's order."""

import numpy as np
import pytest
from tinygrad import Tensor

from engine.formats.rope_order import HeadOrder


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        (HeadOrder(4, 4, interleaved=True), [0, 2, 1, 3, 4, 6, 5, 7]),
        (HeadOrder(4, 4, interleaved=False), [0, 1, 2, 3, 4, 5, 6, 7]),
        (HeadOrder(8, 4, interleaved=False), [0, 1, 4, 5, 2, 3, 6, 7]),
        (HeadOrder(8, 4, interleaved=True), [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_pairs_are_half_a_head_apart(order, wanted):
    np.testing.assert_array_equal(order.apply(np.arange(8)), wanted)
    assert order.is_engines == (wanted == list(range(8)))


@pytest.mark.parametrize("rotated", [4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_arrays_and_tensors_give_the_same(interleaved, rotated):
    order, rows = HeadOrder(8, rotated, interleaved), np.arange(16 * 3).reshape(16, 3)
    np.testing.assert_array_equal(order.apply(Tensor(rows)).numpy(), order.apply(rows))
