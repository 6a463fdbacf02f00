"""Mixtures of experts against numpy: the choice, the lists of tokens of each expert, and the whole layer."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tinygrad import Tensor, dtypes

from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import (
    Quantization,
    buffer_names,
    buffer_type,
    quantize_activations,
)
from engine.targets.cpu.kernels.expert_choice import Choice, choose_experts, choose_scored_experts
from engine.targets.cpu.kernels.experts import (
    add_experts,
    expert_product,
    expert_shape,
    group_experts,
    max_tiles,
)
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.lanes import MAX_TILES
from engine.targets.cpu.kernels.product import span_of
from engine.targets.cpu.kernels.step_state import TILES, TOKENS
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.kernels.cpu.test_product import ints, packed
from tests.thorough import rarely

EPS, LEAST = 1e-5, 6.1e-5
EXPERTS, USED, DIM, WIDTH = 6, 2, 64, 96


def floats(values: np.ndarray) -> Tensor:
    return memory.array(values.astype(np.float32), dtypes.float32)


def chosen_by(pool: ThreadPool, logits: np.ndarray, used: int, least: float | None, lanes: int):
    """The experts and their probabilities, (tokens, used) each. Those of one token are counted."""
    tokens, experts = logits.shape
    width, tile = -(-experts // lanes) * lanes, 1 if tokens == 1 else lanes
    rows = np.full((tokens, width), 9.0, np.float32)  # the last rows of a router are filled up with anything
    rows[:, :experts] = logits
    chosen = memory.zeros(tokens * used, dtypes.int32)
    weights = memory.zeros(tokens * used, dtypes.float32)
    read = ints(-(-tokens // tile), tokens) if tile > 1 else ints(*range(experts))
    step = KernelSequence(pool)
    kernel, parts = choose_experts(experts, used, least, lanes, tile), 1 if tile == 1 else 0
    step.add(kernel, chosen, weights, read, floats(rows), parts=parts)
    step.compile()()
    if tile == 1:
        counted = memory.view(read) - np.arange(experts)
        np.testing.assert_array_equal(counted, np.isin(np.arange(experts), memory.view(chosen)))
    return (memory.view(a).reshape(tokens, used) for a in (chosen, weights))


def wanted_choice(logits: np.ndarray, used: int, least: float | None) -> tuple[np.ndarray, np.ndarray]:
    p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    best = np.argsort(-p, -1, kind="stable")[:, :used]
    weights = np.take_along_axis(p, best, -1)
    if least is not None:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), least)
    return best, weights


@pytest.mark.parametrize(
    ("experts", "used", "least", "tokens", "lanes"),
    [
        (5, 1, None, 1, 16),
        (5, 1, None, 21, 8),
        (6, 2, LEAST, 21, 16),
        (32, 4, None, 21, 16),
        (64, 8, 0.5, 1, 8),
        (64, 8, 0.5, 21, 8),
        (3, 3, LEAST, 1, 8),
    ],
)
def test_choice(
    pool: ThreadPool, experts: int, used: int, least: float | None, tokens: int, lanes: int
) -> None:
    logits = np.random.default_rng(experts).normal(0, 2, (tokens, experts)).astype(np.float32)
    logits[0] = np.arange(experts) % 2  # equal ones: the first ones are taken
    chosen, weights = chosen_by(pool, logits, used, least, lanes)
    best, wanted = wanted_choice(logits, used, least)
    np.testing.assert_array_equal(chosen, best)
    np.testing.assert_allclose(weights, wanted, rtol=3e-6)


@pytest.mark.parametrize(
    ("choice", "tokens", "lanes"),
    [
        (Choice(16, 3, LEAST, "sigmoid", True, 2.5, 1, 1, False), 21, 8),
        (Choice(16, 3, LEAST, "softmax", True, 1.0, 1, 1, False), 1, 8),
        (Choice(256, 8, LEAST, "sigmoid", True, 2.5, 8, 4, False), 21, 16),
        rarely(Choice(16, 3, None, "sigmoid", False, 0.5, 4, 2, True), 1, 16),
        rarely(Choice(12, 2, None, "softmax", False, 0.5, 3, 1, True), 5, 8),
        rarely(Choice(12, 1, None, "sigmoid", True, 1.0, 3, 1, False), 21, 8),
    ],
)
def test_choice_by_scores(pool: ThreadPool, choice: Choice, tokens: int, lanes: int) -> None:
    rng, n = np.random.default_rng(choice.experts), choice.experts
    logits = rng.normal(0, 2, (tokens, n)).astype(np.float32)
    logits[0, 0] = -200  # a score of 0
    bias, scales = rng.normal(0, 0.3, n), rng.uniform(0.5, 2, n)
    width, tile = -(-n // lanes) * lanes, 1 if tokens == 1 else lanes
    rows = np.full((tokens, width), 9.0, np.float32)
    rows[:, :n] = logits
    chosen = memory.zeros(tokens * choice.used, dtypes.int32)
    weights = memory.zeros(tokens * choice.used, dtypes.float32)
    read = ints(-(-tokens // tile), tokens) if tile > 1 else ints(*[0] * n)
    step = KernelSequence(pool)
    others = [floats(a) for a, has in ((bias, choice.biased), (scales, choice.scaled)) if has]
    kernel = choose_scored_experts(choice, lanes, tile)
    step.add(kernel, chosen, weights, read, floats(rows), *others, parts=1 if tile == 1 else 0)
    step.compile()()

    x = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-x))
    if choice.scoring == "softmax":
        scores = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    ranked = scores + bias if choice.biased else scores
    groups = ranked.reshape(tokens, choice.groups, -1)
    if choice.groups > 1:
        of_group = np.sort(groups, -1)[..., -2:].sum(-1)
        least = np.sort(of_group, -1)[:, -choice.used_groups, None]
        ranked = np.where((of_group >= least)[..., None], groups, -np.inf).reshape(tokens, n)
    best = np.argsort(-ranked, -1, kind="stable")[:, : choice.used]
    wanted = np.take_along_axis(scores, best, -1)
    if choice.least_sum is not None:
        wanted /= np.maximum(wanted.sum(-1, keepdims=True), choice.least_sum)
    wanted *= choice.factor
    if choice.scaled:
        wanted *= scales[best]
    np.testing.assert_array_equal(memory.view(chosen).reshape(best.shape), best)
    np.testing.assert_allclose(memory.view(weights).reshape(best.shape), wanted, rtol=5e-6, atol=1e-30)
    if tile == 1:
        np.testing.assert_array_equal(memory.view(read), np.isin(np.arange(n), best))


def test_logits_far_apart(pool: ThreadPool) -> None:
    logits = np.array([[-3e4, 200.0, 0.0, 3e4, -1e6]], np.float32)
    chosen, weights = chosen_by(pool, logits, 3, LEAST, 8)
    assert chosen.tolist() == [[3, 1, 2]]
    np.testing.assert_allclose(weights, [[1, 0, 0]], atol=1e-30)


def test_groups_of_three_experts(pool: ThreadPool) -> None:
    """A register array of three elements is filled at once."""
    places, *outs = (memory.zeros(size, dtypes.int32) for size in (6, 4, 32, 1, 3))
    step = KernelSequence(pool)
    tile_experts, sources, tiles, choices = outs
    chosen = ints(1, 2, 1, 2, 2, 0)
    buffers = tile_experts, sources, places, tiles, choices, ints(1, 3), chosen
    step.add(group_experts(3, 2, 8), *buffers, parts=1)
    step.compile()()
    assert memory.view(choices).tolist() == [1, 2, 3] and memory.view(tiles).tolist() == [3]
    assert memory.view(places).tolist() == [8, 16, 9, 17, 18, 0]


@pytest.mark.parametrize("tile", [4, 8])
def test_groups(pool: ThreadPool, tile: int) -> None:
    """Experts without tokens, one that all tokens take, and a second step with fewer tokens."""
    experts, used, most = 7, 3, 40
    n = max_tiles(most, used, experts, tile)
    tile_experts, sources, places, tiles, choices, chosen = (
        memory.zeros(size, dtypes.int32) for size in (n, n * tile, most * used, 1, experts, most * used)
    )
    state = ints(0, 0)
    step = KernelSequence(pool)
    buffers = tile_experts, sources, places, tiles, choices, state, chosen
    step.add(group_experts(experts, used, tile), *buffers, parts=1)
    run = step.compile()
    rng, counted = np.random.default_rng(1), np.zeros(experts, np.int32)
    for tokens in (most, 1, 5):
        pairs = np.array([[5, *rng.choice([0, 2, 3, 6], 2, replace=False)] for _ in range(tokens)], np.int32)
        memory.view(chosen)[: pairs.size] = pairs.reshape(-1)
        memory.view(state)[TOKENS] = tokens
        run()
        counts = np.bincount(pairs.reshape(-1), minlength=experts)
        counted += counts
        np.testing.assert_array_equal(memory.view(choices), counted)
        of_tiles = np.repeat(np.arange(experts), -(-counts // tile))
        assert memory.view(tiles)[TILES] == of_tiles.size <= n
        np.testing.assert_array_equal(memory.view(tile_experts)[: of_tiles.size], of_tiles)
        at = memory.view(places)[: pairs.size].reshape(pairs.shape)
        assert len(set(at.reshape(-1).tolist())) == pairs.size
        np.testing.assert_array_equal(of_tiles[at // tile], pairs)
        np.testing.assert_array_equal(memory.view(sources)[at], np.arange(tokens)[:, None] + 0 * pairs)
        unused = np.setdiff1d(np.arange(of_tiles.size * tile), at)
        assert not memory.view(sources)[unused].any()


class Layer:
    """A layer of experts on the pool: normed, and added to the stream or not."""

    def __init__(self, pool: ThreadPool, kind: Type, lanes: int, biased: bool, activation: str) -> None:
        self._pool, self._kind, self._lanes, self._biased = pool, kind, lanes, biased
        self._activation = activation
        rng = np.random.default_rng(5)
        width = WIDTH if kind != Type.Q4_K else 256
        self.dim = DIM if kind != Type.Q4_K else 256
        self.width = width
        self.gate, self.up = (packed(pool, kind, EXPERTS * width, self.dim, lanes) for _ in range(2))
        self.down = packed(pool, kind, EXPERTS * self.dim, width, lanes)
        self.biases = [
            rng.normal(0, 1.0 if biased else 0.0, (EXPERTS, n)).astype(np.float32)
            for n in (width, width, self.dim)
        ]
        size = np.linalg.norm(np.concatenate([self.gate[2], self.up[2]]), axis=1).mean()  # of what gates take
        self.norm = (rng.uniform(0.5, 1.5, self.dim) * 3 / size).astype(np.float32)

    def run(self, x: np.ndarray, chosen: np.ndarray, weights: np.ndarray, added: bool) -> np.ndarray:
        tokens, lanes, dim, width = len(x), self._lanes, self.dim, self.width
        tile = 1 if tokens == 1 else lanes
        step = KernelSequence(self._pool)
        stream, ids, probabilities = floats(x), memory.array(chosen, dtypes.int32), floats(weights)
        n = max_tiles(tokens, USED, EXPERTS, tile)
        tile_experts, tiles, lists, gather = ids, ints(USED), [], []
        if tile > 1:
            state = ints(-(-tokens // tile), tokens)
            tile_experts, sources, places, tiles, choices = (
                memory.zeros(size, dtypes.int32) for size in (n, n * tile, tokens * USED, 1, EXPERTS)
            )
            outs = tile_experts, sources, places, tiles, choices
            step.add(group_experts(EXPERTS, USED, tile), *outs, state, ids, parts=1)
            lists, gather = [state, places], [tiles, sources]

        def product(matrix, bias: np.ndarray, inputs: list[Tensor], shared: bool, rows: int, cols: int):
            layout, packed_weights, _ = matrix
            out = memory.zeros(n * tile * rows, dtypes.float32)
            kernel = expert_product(layout, tile, span_of(cols) if tile > 1 else 1, shared)
            shape = ints(*expert_shape(rows, cols, layout, self._biased))
            biases = floats(bias) if self._biased else floats(np.zeros(rows))
            step.add(kernel, out, shape, tiles, tile_experts, *inputs, biases, packed_weights, parts=7)
            return out

        def prepared(quantization: Quantization, cols: int, *buffers: Tensor) -> list[Tensor]:
            outs = []
            for name in quantization.outputs:
                dtype, columns = buffer_type(name)
                outs.append(memory.zeros(n * tile * cols // columns, dtype))
            kernel = quantize_activations(quantization, lanes, tile)
            step.add(kernel, *outs, ints(cols // UNIT), *buffers)
            return outs

        names = buffer_names([self.gate[0]], tile)
        inputs = prepared(
            Quantization(names, EPS, gathered=tile > 1), dim, *gather, stream, floats(self.norm)
        )
        gate, up = (
            product(matrix, bias, inputs, tile == 1, width, dim)
            for matrix, bias in zip((self.gate, self.up), self.biases, strict=False)
        )
        inputs = prepared(Quantization(names, gated=self._activation, rows=True), width, tiles, gate, up)
        results = product(self.down, self.biases[2], inputs, False, dim, width)
        step.add(
            add_experts(USED, added, lanes, tile), stream, ints(dim // UNIT), *lists, probabilities, results
        )
        step.compile()()
        return memory.view(stream).reshape(tokens, dim)

    def wanted(self, x: np.ndarray, chosen: np.ndarray, weights: np.ndarray, added: bool) -> np.ndarray:
        wide = x.astype(np.float64)
        h = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * self.norm
        out = wide * added
        for t, (experts, each) in enumerate(zip(chosen, weights, strict=True)):
            for e, weight in zip(experts, each, strict=True):

                def product(matrix, bias: np.ndarray, x: np.ndarray, e: int = e) -> np.ndarray:
                    return matrix[2].reshape(EXPERTS, bias.shape[1], -1)[e] @ x + bias[e]

                g, u = product(self.gate, self.biases[0], h[t]), product(self.up, self.biases[1], h[t])
                if self._activation == "silu":
                    hidden = g / (1 + np.exp(-g)) * u
                else:
                    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
                    hidden = g / (1 + np.exp(-1.702 * g)) * (u + 1)
                out[t] += weight * product(self.down, self.biases[2], hidden)
        return out


@pytest.mark.parametrize(
    ("kind", "biased", "activation", "lanes"),
    [
        rarely(Type.Q4_K, False, "silu", 16),
        rarely(Type.Q8_0, True, "swiglu_oai", 8),
        (Type.F32, True, "silu", 8),
    ],
    ids=lambda v: v.name if isinstance(v, Type) else "",
)
def test_layers(pool: ThreadPool, kind: Type, biased: bool, activation: str, lanes: int) -> None:
    """One token; some, of which most take the same expert and none another; and a chunk that all take an expert."""
    layer, rng = Layer(pool, kind, lanes, biased, activation), np.random.default_rng(2)
    for tokens in (1, 2 * lanes + 3, MAX_TILES * lanes):
        x = rng.standard_normal((tokens, layer.dim)).astype(np.float32)
        others = rng.choice([0, 1, 3, 5], tokens)
        chosen = np.stack([np.full(tokens, 4), others], 1).astype(np.int32)
        chosen[::3] = chosen[::3, ::-1]
        weights = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
        added = tokens != 2 * lanes + 3
        got, wanted = layer.run(x, chosen, weights, added), layer.wanted(x, chosen, weights, added)
        error = np.abs(got - wanted).max() / np.abs(wanted).max()
        assert error < (1e-5 if kind == Type.F32 else 2e-4)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_layer_that_all_tokens_share(pool: ThreadPool, tokens: int) -> None:
    lanes, rng = 8, np.random.default_rng(4)
    x, shared = rng.standard_normal((2, tokens, DIM)).astype(np.float32)
    results = rng.standard_normal((tokens * USED, DIM)).astype(np.float32)
    gates = rng.normal(0, 2, (tokens, lanes)).astype(np.float32)
    weights, places = rng.uniform(0, 1, (tokens, USED)), np.arange(tokens * USED)
    if tokens > 1:
        rng.shuffle(places)
    lists = [ints(1, tokens), ints(*places)] if tokens > 1 else []
    out, step = floats(x), KernelSequence(pool)
    reads = *lists, floats(weights), floats(results), floats(gates), floats(shared)
    tile = lanes if tokens > 1 else 1
    step.add(add_experts(USED, True, lanes, tile, shared=True), out, ints(DIM // UNIT), *reads)
    step.compile()()
    of_experts = (results[places].reshape(tokens, USED, DIM) * weights[..., None]).sum(1)
    wanted = x + of_experts + shared / (1 + np.exp(-gates[:, :1]))
    np.testing.assert_allclose(memory.view(out).reshape(tokens, DIM), wanted, atol=1e-5)
