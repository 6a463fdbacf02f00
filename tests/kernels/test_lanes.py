"""The lane product against float64 products of what the gguf package says the weights are."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tinygrad import Tensor

from engine.fixes import cpu_vectors
from engine.formats.quantization import FLOATS, QUANTIZED, Matrix
from engine.kernels.lanes import Program, lane_product
from tests.formats.test_quantization import random_blocks

LANES = 16


@pytest.fixture(autouse=True)
def whole_vectors() -> None:
    cpu_vectors.apply()


def error(
    kind: int, rows: int, cols: int, tokens: int, tile: int, lanes: int = LANES, threads: int = 1
) -> float:
    """The largest error of a product, relative to its largest element."""
    blocks = random_blocks(Type(kind), rows, cols)
    if kind in QUANTIZED:  # scales of a size that leaves no infinities
        blocks = np.where(np.isfinite(gguf.dequantize(blocks, Type(kind))).all(1, keepdims=True), blocks, 0)
        blocks = np.ascontiguousarray(blocks, np.uint8)
    weights = gguf.dequantize(blocks, Type(kind)).reshape(rows, cols).astype(np.float64)
    matrix = Matrix(Tensor(blocks.reshape(-1)), kind, rows, cols, lanes).realize()
    x = np.random.default_rng(1).standard_normal((tokens, matrix.padded_cols)).astype(np.float32)
    x[:, cols:] = 0
    inputs = [Tensor(np.ascontiguousarray(x.reshape(tokens // tile, tile, -1).transpose(0, 2, 1)))]
    if matrix.format and tile == 1:
        inputs.append(Tensor(x.reshape(tokens, -1, matrix.format.group).sum(-1)))
    kernel = lane_product(matrix.format, tokens, matrix.padded_rows, matrix.padded_cols, lanes, tile, threads)
    out = Tensor.empty(tokens, matrix.padded_rows)
    out = Tensor.custom_kernel(out, *inputs, *matrix.planes.values(), fxn=kernel)[0]
    wanted = x[:, :cols].astype(np.float64) @ weights.T
    return float(np.abs(out.numpy()[:, :rows] - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED], ids=lambda kind: Type(kind).name)
def test_every_format(kind: int, tile: int) -> None:
    assert error(kind, 40, 512, tile, tile) < 3e-6


@pytest.mark.parametrize("tile", [2, 8, 16])
def test_tokens_that_share_a_load(tile: int) -> None:
    assert error(Type.Q6_K, 32, 256, tile, tile) < 3e-6


def test_more_tokens_than_fit_registers_take_turns() -> None:
    assert error(Type.Q8_0, 48, 96, 12, 4) < 3e-6


@pytest.mark.parametrize("lanes", [4, 8, 32])
def test_other_widths(lanes: int) -> None:
    assert error(Type.Q4_K, 64, 256, 1, 1, lanes) < 3e-6


@pytest.mark.parametrize("n, parts", [(12, 4), (13, 4), (7, 6), (1, 1), (5, 5)])
def test_parts_cover_all_steps(n: int, parts: int) -> None:
    size, first = Program(1).share(n, parts)
    starts = [
        int(first.substitute({r: r.const_like(i) for r in first.ranges}).simplify().vmax)
        for i in range(parts)
    ]
    assert set().union(*(range(s, s + size) for s in starts)) == set(range(n))
