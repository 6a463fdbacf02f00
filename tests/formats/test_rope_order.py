"""The order of query and key rows, on the host and in tensor graphs."""

import numpy as np
from tinygrad import Tensor

from engine.formats.rope_order import half_split


def test_rows_of_interleaved_pairs_are_split_in_halves():
    np.testing.assert_array_equal(half_split(np.arange(8), 4), [0, 2, 1, 3, 4, 6, 5, 7])


def test_rows_of_tensors_move_as_a_whole():
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    np.testing.assert_array_equal(half_split(Tensor(rows), 4).numpy(), half_split(rows, 4))
    np.testing.assert_array_equal(half_split(rows, 4)[1], rows[2])
