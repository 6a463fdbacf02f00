"""Every quantization type in tensor graphs, against the gguf package's own dequantization."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tinygrad import Tensor

from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import FLOATS, QUANTIZED, read_as
from engine.formats.widening import widened
from engine.kernels.quantized_matrix import QuantizedMatrix
from tests.quantized_blocks import Q1_0, dequantized, random_blocks
from tests.thorough import rarely

ROWS = 40
# A commit is checked with scales of parts of blocks and with a codebook of vectors. Whole models have floats and Q8_0
# (tests/targets, tests/measure), and MXFP4 (tests/model/test_llama_cpp.py).
COMMON = (Type.Q4_K, Type.IQ2_S)
TYPES = (*FLOATS, *QUANTIZED, Type.TQ2_0, Q1_0, Type.NVFP4, Type.IQ3_S)
KINDS = [kind if kind in COMMON else rarely(kind) for kind in TYPES]


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: GGML_TYPES[kind].name)
def test_weights_rows_and_products(kind: int) -> None:
    """Weights and rows are equal to the last bit; products are, but for the rounding of sums."""
    cols = 512 if GGML_TYPES[kind].block > 32 else 96  # no whole plane bytes
    blocks = random_blocks(kind, ROWS, cols)
    wanted = dequantized(kind, blocks).reshape(ROWS, cols)
    matrix = QuantizedMatrix(read_as(kind), ROWS, cols)
    for rows in (range(0, 24), range(24, ROWS)):  # in two pieces
        matrix.store(Tensor(widened(kind, blocks.reshape(ROWS, -1)[rows].reshape(-1))), rows)
    np.testing.assert_array_equal(matrix.dequantize().numpy(), wanted)
    ids = np.array([3, 39, 17, 3], np.int32)
    np.testing.assert_array_equal(matrix.take(Tensor(ids)).numpy(), wanted[ids])
    finite = np.isfinite(wanted).all(1)  # a random scale may be infinite
    assert finite.sum() > ROWS // 2
    x = np.random.default_rng(1).standard_normal((4, cols)).astype(np.float32)
    exact = x.astype(np.float64) @ wanted[finite].T.astype(np.float64)
    for n_tokens in (1, 4):
        product = matrix.product(Tensor(x[:n_tokens])).numpy()[:, finite]
        np.testing.assert_allclose(product, exact[:n_tokens], atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: Type(kind).name)
def test_bytes_on_the_device_are_the_files(kind: int) -> None:
    blocks = random_blocks(Type(kind), 32, 1024)
    matrix = QuantizedMatrix(kind, 32, 1024)
    n_bytes = sum(plane.nbytes() for plane in matrix.planes.values())
    assert blocks.nbytes <= n_bytes <= 1.04 * blocks.nbytes
