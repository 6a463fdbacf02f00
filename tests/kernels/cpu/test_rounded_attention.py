"""Attention of patches on 16-bit integers, against numpy."""

import numpy as np
import pytest
from tinygrad import dtypes

from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.patches import FIRST, PatchHeads
from engine.targets.cpu.kernels.rounded_attention import (
    LANES,
    attend_rounded,
    round_queries,
    round_values,
    rounds,
)
from engine.targets.cpu.kernels.step_state import TILES
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.kernels.cpu.test_product import ints
from tests.thorough import thorough

HEADS, DIM, PATCHES, TILES_OF_ALL, PARTS = 2, 24, 40, 3, 4
ROWS = TILES_OF_ALL * LANES


def attended(pool: ThreadPool, q, keys, v):
    """Queries, keys and values (heads, patches, dim) after attention, (patches, heads * dim), in two chunks."""
    h = PatchHeads(HEADS, DIM, 1.0, None, None, False, False, LANES)
    assert rounds(h)

    def tiled(x, cols=DIM):
        return np.pad(x, ((0, 0), (0, ROWS - PATCHES), (0, cols - DIM))).reshape(
            HEADS, TILES_OF_ALL, LANES, cols
        )

    def zeros(n, dtype=dtypes.float32):
        return memory.zeros(n, dtype)

    floats = [memory.array(tiled(x).transpose(0, 1, 3, 2), dtypes.float32) for x in (q, keys)]
    floats.append(memory.array(tiled(v, h.padded_dim), dtypes.float32))
    rounded = [zeros(HEADS * ROWS * n, dtypes.int16) for n in (DIM, DIM, h.padded_dim)]
    scales = [zeros(HEADS * ROWS) for _ in range(3)]
    hidden = memory.array(np.where(np.arange(ROWS) < PATCHES, 0, -1e30).astype(np.float32), dtypes.float32)
    tiles, state, out = ints(TILES_OF_ALL, TILES_OF_ALL), ints(*[0] * (FIRST + 1)), zeros(ROWS * h.width)
    scratch = [zeros(PARTS * ROWS * LANES), zeros(PARTS * ROWS * LANES, dtypes.int16), zeros(PARTS * ROWS)]
    begin, attend = KernelSequence(pool), KernelSequence(pool)
    rounding = round_queries(h), round_queries(h.of_keys), round_values(h)
    for kernel, *buffers in zip(rounding, rounded, scales, floats, strict=True):
        begin.add(kernel, *buffers, tiles, state, parts=PARTS)
    attend.add(attend_rounded(h), out, *scratch, *rounded, *scales, hidden, tiles, state, parts=PARTS)
    result = []
    for sequence in (begin.compile(), attend.compile()):
        for first, n in ((0, 2), (2, 1)):
            memory.view(state)[TILES], memory.view(state)[FIRST] = n, first * LANES
            sequence()
            result.append(memory.view(out).reshape(ROWS, -1)[: n * LANES, : HEADS * DIM].copy())
    return np.concatenate(result[2:])[:PATCHES]


@thorough  # encoders in tests/targets/test_vision.py
@pytest.mark.parametrize("spread", [0.1, 4.0, 0.0], ids=["flat", "peaked", "all as large as can be"])
def test_it_is_attention_with_little_error(pool, spread):
    rng = np.random.default_rng(2)
    q, keys, v = rng.standard_normal((3, HEADS, PATCHES, DIM)).astype(np.float32)
    q, keys = (
        (q * spread**0.5, keys * spread**0.5) if spread else (np.full_like(q, 0.5), np.full_like(q, 0.5))
    )
    v = v if spread else np.full_like(v, -3.0)
    scores = np.einsum("hqd,hkd->hqk", q, keys, dtype=np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hqk,hkd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(PATCHES, -1)
    assert np.abs(attended(pool, q, keys, v) - wanted).max() < (1e-3 + 5e-4 * spread) * np.abs(wanted).max()
