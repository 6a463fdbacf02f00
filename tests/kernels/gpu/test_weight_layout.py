"""Integers packed in words, and the bytes of matrices."""

import numpy as np
import pytest

from engine.targets.nvidia.kernels.weights.bit_packing import DENORMAL_EXPONENT, BitPacking
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_bit_of_a_word_belongs_to_one_integer(bits):
    packing = BitPacking(bits)
    seen = np.zeros((packing.words, 32), int)
    for j in range(packing.period):
        fields = packing.fields(j)
        assert sum(field.n for field in fields) == bits
        for word, low, n, _ in fields:
            seen[word, low : low + n] += 1
        # within a float's significand, or a float of its own
        assert packing.position(j) + bits <= 24 or packing.position(j) == DENORMAL_EXPONENT
    assert (seen == 1).all()


@pytest.mark.parametrize("bits", [3, 5])
def test_a_quarter_of_a_unit_has_whole_words_and_a_half(bits):
    packing = BitPacking(bits)
    n = packing.quarter_words
    for j in range(UNIT):
        quarter = j // QUARTER
        for word, low, _, _ in packing.fields(j):
            whole = word // n == quarter
            assert whole or (word == 4 * n + quarter // 2 and low // 16 == quarter % 2)


@pytest.mark.parametrize(
    "ggml_type, limit",
    [
        *((2, 1), (3, 1), (6, 1), (7, 1), (8, 1), (10, 1), (11, 1.04), (12, 1.03), (13, 1.03), (14, 1)),
        *((20, 1), (23, 1.02), (39, 1)),
    ],
)
def test_the_bytes_of_a_matrix_are_the_files(ggml_type, limit):
    layout = WeightLayout(ggml_type)
    stored = 4096 // layout.format.block * layout.format.block_bytes
    assert layout.n_bytes(1, 4096) <= limit * stored
