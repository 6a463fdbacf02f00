"""Rotation, the cache and attention, against numpy: heads of all sizes, norms, temperatures, and windows behind which
blocks are written again."""

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import dtypes

from engine.formats.kv_format import QUANT_BLOCK
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.attention import attention, mask, n_parts, scratch_size
from engine.targets.cpu.kernels.kernel_sequence import CompiledSequence, KernelSequence
from engine.targets.cpu.kernels.lanes import MAX_TILES
from engine.targets.cpu.kernels.rope import HeadLanes, rotate
from engine.targets.cpu.kernels.step_state import SIZE, TILES
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.kernels.cpu.test_product import LANES, ints
from tests.thorough import rarely, thorough

EPS = 1e-6
# `Layer` says how long blocks are.
PLAIN = HeadLanes(query=4, kv=2, dim=32, block=0, lanes=LANES, scale=32**-0.5)


class Layer:
    """A layer's attention on the pool, and what it should be."""

    def __init__(self, pool: ThreadPool, heads: HeadLanes, positions: int) -> None:
        rng, block, tokens = np.random.default_rng(1), 2 * heads.lanes, MAX_TILES * heads.lanes
        table, kept = -(-positions // block), -(-(heads.window + tokens) // block) + 2
        blocks = rng.permutation(min(table, kept) if heads.window else table)
        h = self.heads = replace(heads, block=block)
        # The tokens are those of sequence 1; those that fill a tile, of sequence 0. Blocks behind a window are taken
        # again, one after the other.
        of_tokens = [len(blocks)] * table, np.resize(blocks, table)
        self.rows = rng.standard_normal((positions, h.query + 2 * h.kv, h.dim)).astype(np.float32)
        angles = rng.uniform(0, 6, (positions, h.dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.norms = [
            rng.standard_normal(n * h.dim if h.norms_over_heads else h.dim).astype(np.float32)
            for n in (h.query, h.kv)
        ]
        self.sinks = rng.uniform(-2, 4, h.query).astype(np.float32)
        self.temperatures = rng.uniform(0.5, 2, positions).astype(np.float32)
        self._state, self._places = (memory.zeros(n, dtypes.int32) for n in (SIZE, 2 * tokens))
        self._blocks = ints(table, len(blocks) + 1, *np.concatenate(of_tokens))
        self._rows, self._queries, self._out = (
            memory.zeros(tokens * n, dtypes.float32) for n in (h.rows, h.query * h.dim, h.query * h.dim)
        )
        used = [norm for norm, is_used in zip(self.norms, (h.query_norm, h.key_norm), strict=True) if is_used]
        used += [self.temperatures] if h.temperature else []
        self._cached = [memory.zeros(n, dtype) for n, dtype in h.cached(len(blocks) + 1)]
        self._tables = [memory.array(a, dtypes.float32) for a in (self.cos, self.sin, *used)]
        self._mask = memory.array(mask(h.lanes), dtypes.float32)
        self._sinks = [memory.array(self.sinks, dtypes.float32)] if h.sinks else []
        self._steps = {tile: self._step(pool, tile, table) for tile in (1, h.lanes)}

    def _step(self, pool: ThreadPool, tile: int, table: int) -> CompiledSequence:
        h, rows, state = self.heads, int(tile == 1), [self._state] if tile > 1 else []
        cached = [*self._cached, self._blocks, *state, self._places]
        scores = memory.zeros(scratch_size(h, table, pool.count, tile, rows), dtypes.float32)
        step = KernelSequence(pool)
        step.add(rotate(h, tile), self._queries, *cached, self._rows, *self._tables)
        reads = scores, *cached, self._queries, self._mask, *self._sinks
        kernel, parts = attention(h, pool.count, tile, rows), n_parts(h, pool.count, tile, rows)
        step.add(kernel, self._out, *reads, parts=parts)
        return step.compile()

    def run(self, position: int, tokens: int) -> np.ndarray:
        """Attention of the next tokens, float32 (tokens, query, dim)."""
        h, tile = self.heads, 1 if tokens == 1 else self.heads.lanes
        rows = memory.view(self._rows)
        rows[:] = 7.0  # a step's last tile is filled up with anything
        rows[: tokens * h.rows] = self.rows[position : position + tokens].reshape(-1)
        state = memory.view(self._state)
        state[TILES], places = -(-tokens // tile), memory.view(self._places).reshape(-1, 2)
        places[:tokens, 0], places[:tokens, 1] = range(position, position + tokens), 1
        places[tokens:] = 0
        self._steps[tile]()
        return memory.view(self._out).reshape(-1, h.query, h.dim)[:tokens]

    def wanted(self) -> np.ndarray:
        """The same of all tokens, float64 (positions, query, dim)."""
        h, half = self.heads, self.heads.dim // 2
        rows = self.rows.astype(np.float64)
        queries, keys, values = np.split(rows, [h.query, h.query + h.kv], 1)

        def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            flat = x.reshape(len(x), -1, weight.size)
            flat = flat / np.sqrt((flat * flat).mean(-1, keepdims=True) + EPS) * weight
            return flat.reshape(x.shape)

        def rotated(x: np.ndarray) -> np.ndarray:
            a, b, cos, sin = x[..., :half], x[..., half:], self.cos[:, None], self.sin[:, None]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        queries = rotated(normed(queries, self.norms[0]) if h.query_norm else queries) * h.scale
        queries = queries * self.temperatures[:, None, None] if h.temperature else queries
        keys = rotated(normed(keys, self.norms[1]) if h.key_norm else keys)
        keys, values = (
            self._as_cached(x).repeat(h.query // h.kv, 1).astype(np.float64) for x in (keys, values)
        )
        scores = np.einsum("qhd,khd->hqk", queries, keys)
        age = np.arange(len(rows))[:, None] - np.arange(len(rows))
        scores[:, (age < 0) | (age >= (h.window or len(rows)))] = -np.inf
        weights = np.exp(scores)
        sinks = np.exp(self.sinks[:, None, None]) if h.sinks else 0
        return np.einsum("hqk,khd->qhd", weights / (weights.sum(-1, keepdims=True) + sinks), values)

    def _as_cached(self, x: np.ndarray) -> np.ndarray:
        if not self.heads.is_quantized:
            return x.astype(self.heads.dtype.fmt)
        blocks = x.reshape(*x.shape[:-1], -1, QUANT_BLOCK)
        scales = np.abs(blocks).max(-1, keepdims=True) / 127
        return (np.rint(blocks / scales) * scales.astype(np.float16)).reshape(x.shape)


@pytest.fixture
def all_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sums as for users, where other tests have a quarter (`tests.environment`)."""
    monkeypatch.setattr("engine.targets.cpu.kernels.attention.MAX_SUMS", 16)


def check(pool: ThreadPool, heads: HeadLanes, *steps: int) -> None:
    """Runs steps of so many tokens, one after another."""
    layer = Layer(pool, heads, sum(steps) + MAX_TILES * heads.lanes)
    wanted, position = layer.wanted(), 0
    for tokens in steps:
        got = layer.run(position, tokens)
        # A rotated key may lie so close to the middle of two integers that float32 takes the other one.
        atol = {dtypes.float32: 1e-5, dtypes.float16: 5e-4, dtypes.int8: 5e-3}[heads.dtype]
        np.testing.assert_allclose(got, wanted[position : position + tokens], atol=atol)
        position += tokens


@thorough  # models in tests/targets
@pytest.mark.parametrize("query_norm", [False, True])
def test_a_norm_of_queries_or_keys_alone(pool: ThreadPool, query_norm: bool) -> None:
    check(pool, replace(PLAIN, norm_eps=EPS, query_norm=query_norm, key_norm=not query_norm), 19, 1, 1)


@thorough
def test_a_cache_of_float32(pool: ThreadPool) -> None:
    check(pool, replace(PLAIN, dtype=dtypes.float32, window=24), 64, 40, 1)


@pytest.mark.usefixtures("all_sums")
@pytest.mark.parametrize(("dim", "lanes", "window"), [rarely(64, 4, 0), rarely(96, 16, 0), (32, 8, 20)])
def test_a_cache_of_integers_with_scales(pool: ThreadPool, dim: int, lanes: int, window: int) -> None:
    heads = replace(PLAIN, query=6, dim=dim, lanes=lanes, window=window, dtype=dtypes.int8)
    check(pool, heads, 19, 1, 1, 32, 1)


@pytest.mark.usefixtures("all_sums")
@pytest.mark.parametrize(("window", "lanes"), [rarely(0, 8), rarely(9, 16)])
def test_sinks(pool: ThreadPool, window: int, lanes: int) -> None:
    heads = replace(PLAIN, query=12, lanes=lanes, sinks=True, window=window)
    check(pool, heads, 19, 1, 1, 40, 1)


@pytest.mark.parametrize(("key_norm", "lanes"), [rarely(False, 16), rarely(True, 8)])
def test_norms_over_all_heads(pool: ThreadPool, key_norm: bool, lanes: int) -> None:
    heads = replace(PLAIN, query=6, kv=3, dim=96, lanes=lanes, scale=96**-0.5, norm_eps=EPS)
    check(pool, replace(heads, query_norm=True, key_norm=key_norm, norms_over_heads=True), 19, 1, 1)


@thorough  # tests/targets/test_cpu.py has scales
@pytest.mark.usefixtures("all_sums")
def test_scale_and_temperature(pool: ThreadPool) -> None:
    check(pool, replace(PLAIN, scale=0.5, norm_eps=EPS, query_norm=True, temperature=True), 19, 1, 1)


@pytest.mark.parametrize(
    ("dim", "lanes"), [rarely(64, 4), rarely(100, 16), rarely(96, 16), rarely(128, 8), rarely(256, 4)]
)
def test_sizes_of_heads(pool: ThreadPool, dim: int, lanes: int) -> None:
    heads = replace(
        PLAIN, dim=dim, lanes=lanes, scale=dim**-0.5, norm_eps=EPS, query_norm=True, key_norm=True
    )
    check(pool, heads, 2 * lanes + 3, 1, lanes, 1)


@pytest.mark.parametrize(("window", "shared_by"), [rarely(1, 1), rarely(7, 8), rarely(16, 2), rarely(20, 3)])
def test_windows(pool: ThreadPool, window: int, shared_by: int) -> None:
    """All blocks are taken several times, by chunks of any length and by single tokens."""
    heads = replace(PLAIN, query=2 * shared_by, window=window)
    check(pool, heads, 5, 1, 1, 64, 64, 1, 40, 3, 64, *[1] * 25, 64, 1, 17, 1)


@pytest.mark.parametrize("lanes", [rarely(4), rarely(16)])
def test_windows_with_other_widths(pool: ThreadPool, lanes: int) -> None:
    chunk = MAX_TILES * lanes
    heads = replace(PLAIN, lanes=lanes, window=2 * lanes + 1)
    check(pool, heads, chunk, chunk, 1, 3, chunk, chunk // 2, *[1] * 10)


@thorough  # texts begin so in `test_windows`
def test_a_window_longer_than_the_text(pool: ThreadPool) -> None:
    check(pool, replace(PLAIN, window=300), 64, 1, 30, 1)


def test_a_window_needs_scratch_for_itself_alone(pool: ThreadPool) -> None:
    heads = replace(PLAIN, window=512, block=32)
    whole = scratch_size(replace(heads, window=0), 128, pool.count, LANES)
    assert scratch_size(heads, 128, pool.count, LANES) < whole / 7
