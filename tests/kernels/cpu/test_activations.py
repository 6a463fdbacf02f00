"""What products read, and what is added to the residual stream, against numpy."""

import numpy as np
import pytest
from tinygrad import dtypes

from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import (
    Quantization,
    add_normed,
    buffer_names,
    quantize_activations,
)
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from tests.kernels.cpu.test_product import KINDS, LANES, ints
from tests.thorough import rarely

TOKENS, COLS, EPS = 8, 96, 1e-6


def random(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(shape).standard_normal(shape) * scale).astype(np.float32)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS) * weight


def prepared(pool: ThreadPool, quantization: Quantization, tile: int, x: np.ndarray, *other: np.ndarray):
    """The float32 activations (tokens, cols)."""
    out = memory.zeros(x.size, dtypes.float32)
    step = KernelSequence(pool)
    state = [ints(len(x) // tile)] if tile > 1 else []
    rows = (memory.array(a, dtypes.float32) for a in (x, *other))
    step.add(quantize_activations(quantization, LANES, tile), out, ints(COLS // UNIT), *state, *rows)
    step.compile()()
    return memory.view(out).reshape(-1, COLS, tile).swapaxes(1, 2).reshape(x.shape)


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("gated", [rarely("silu"), rarely("gelu"), "swiglu_oai", rarely("sigmoid")])
def test_gates(pool: ThreadPool, gated: str, tile: int) -> None:
    x, other = random(1 if tile == 1 else TOKENS, COLS, scale=3.0), random(1 if tile == 1 else TOKENS, COLS)
    x[0, :12] = [0.0, 1e-20, -1e-20, 30.0, -30.0, 200.0, -200.0, 1e10, -1e10, 1e30, -1e30, -88.0]
    other[0, :12] = 1.0
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = {
            "silu": wide / (1 + np.exp(-wide)),
            "sigmoid": 1 / (1 + np.exp(-wide)),
            "swiglu_oai": np.minimum(wide, 7) / (1 + np.exp(-1.702 * np.minimum(wide, 7))),
            "gelu": wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))),
        }[gated]
    got = prepared(pool, Quantization(("floats",), gated=gated), tile, x, other)
    up = np.clip(other, -7, 7) + 1 if gated == "swiglu_oai" else other
    np.testing.assert_allclose(got, wanted * up, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 4])
def test_norms(pool: ThreadPool, tile: int) -> None:
    x, weight = random(1 if tile == 1 else TOKENS, COLS), random(COLS)
    got = prepared(pool, Quantization(("floats",), EPS), tile, x, weight)
    np.testing.assert_allclose(got, normed(x, weight), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 4])
def test_normed_rows_are_added(pool: ThreadPool, tile: int) -> None:
    tokens = 1 if tile == 1 else TOKENS
    stream, product, weight = random(tokens, COLS), random(tokens, COLS, scale=5.0), random(COLS)
    out = memory.array(stream, dtypes.float32)
    state = [ints(tokens // tile)] if tile > 1 else []
    inputs = (memory.array(a, dtypes.float32) for a in (product, weight))
    step = KernelSequence(pool)
    step.add(add_normed(EPS, LANES, tile), out, ints(COLS // UNIT), *state, *inputs, parts=3)
    step.compile()()
    wanted = stream + normed(product, weight)
    np.testing.assert_allclose(memory.view(out).reshape(tokens, COLS), wanted, rtol=2e-6, atol=2e-6)


def test_a_matrix_of_zeros_and_activations_of_zeros(pool: ThreadPool) -> None:
    names = buffer_names([LaneLayout(8, LANES)], 1)
    outs = [memory.zeros(64, KINDS.get(name, dtypes.float32)) for name in names]
    step = KernelSequence(pool)
    step.add(
        quantize_activations(Quantization(names), LANES, 1), *outs, ints(2), memory.zeros(64, dtypes.float32)
    )
    step.compile()()
    assert all(np.all(memory.view(out) == 0) for out in outs)
