"""How integers lie in words, and how many bytes packed matrices take."""

import numpy as np
import pytest

from engine.kernels.gpu.packing import Packing, Words


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_every_bit_of_a_word_belongs_to_one_integer(bits):
    words = Words(bits)
    seen = np.zeros((words.count, 32), int)
    for j in range(words.period):
        pieces = words.place(j)
        assert sum(n for _, _, n, _ in pieces) == bits
        for word, low, n, _ in pieces:
            seen[word, low : low + n] += 1
        assert words.position(j) + bits <= 24  # a float's mantissa
    assert (seen == 1).all()


@pytest.mark.parametrize(
    "ggml_type, limit", [(2, 1), (3, 1), (6, 1), (7, 1), (8, 1), (12, 1.03), (13, 1.03), (14, 1)]
)
def test_packed_bytes_are_the_files(ggml_type, limit):
    packing = Packing(ggml_type)
    stored = 4096 // packing.format.block * packing.format.block_bytes
    assert packing.n_bytes(1, 4096) <= limit * stored
