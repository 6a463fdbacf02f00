"""Every format against the gguf package's own dequantization: equal to the last bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tinygrad import Tensor

from engine.formats.quantization import FLOATS, QUANTIZED
from engine.kernels.quantized_matrix import QuantizedMatrix

TYPES = [*FLOATS, *QUANTIZED]


def random_blocks(kind: Type, rows: int, cols: int) -> np.ndarray:
    """Blocks of random bits, uint8 (rows, bytes of a row), but for their float16 scales."""
    rng = np.random.default_rng(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind in FLOATS:
        return gguf.quantize(rng.standard_normal((rows, cols)).astype(np.float32), kind).view(np.uint8)
    data = rng.integers(0, 256, (rows * cols // block, block_bytes), dtype=np.uint8)
    scales = rng.standard_normal((len(data), 2)).astype(np.float16).view(np.uint8)
    if kind is Type.Q6_K:
        data[:, -2:] = scales[:, :2]
    else:
        n = 4 if "m" in QUANTIZED[kind].scales else 2
        data[:, :n] = scales[:, :n]
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: Type(kind).name)
def test_weights_are_those_of_the_file(kind: int) -> None:
    rows, cols = 40, 512 if gguf.GGML_QUANT_SIZES[Type(kind)][0] == 256 else 96  # no whole plane bytes
    blocks = random_blocks(Type(kind), rows, cols)
    wanted = gguf.dequantize(blocks, Type(kind)).reshape(rows, cols)
    matrix = QuantizedMatrix(Tensor(blocks.reshape(-1)), kind, rows, cols).realize()
    np.testing.assert_array_equal(matrix.dequantize().numpy(), wanted)
    ids = np.array([3, 39, 17, 3], np.int32)
    np.testing.assert_array_equal(matrix.take(Tensor(ids)).numpy(), wanted[ids])


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: Type(kind).name)
def test_bytes_on_the_device_are_the_files(kind: int) -> None:
    blocks = random_blocks(Type(kind), 32, 1024)
    matrix = QuantizedMatrix(Tensor(blocks.reshape(-1)), kind, 32, 1024).realize()
    n_bytes = sum(plane.nbytes() for plane in matrix.planes.values())
    assert blocks.nbytes <= n_bytes <= 1.03 * blocks.nbytes
