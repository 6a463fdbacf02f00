"""Gated delta nets against numpy: prompts in chunks, single tokens, and a token of each of several sequences."""

from collections.abc import Sequence

import numpy as np
import pytest
from tinygrad import dtypes

from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.delta_net import DeltaHeads, convolve, delta_net
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.step_state import SIZE, TOKENS
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.thorough import rarely, thorough

Array = np.ndarray
EPS, MOST = 1e-6, 24


class Layer:
    """A layer's weights, and what it computes of the rows of its products in float64."""

    def __init__(self, net: DeltaHeads) -> None:
        rng = np.random.default_rng(3)
        self.net = net
        self.taps = rng.normal(0, 0.7, (net.taps, net.channels)).astype(np.float32)
        self.decay, self.bias = -rng.uniform(0.01, 4, net.values), rng.normal(0, 1, net.values)
        self.norm = rng.uniform(0.5, 1.5, net.size).astype(np.float32)

    def rows(self, n: int) -> tuple[Array, Array]:
        rng, net = np.random.default_rng(n), self.net
        gates = rng.normal(0, 3, (n, 2, net.gates))
        return rng.normal(0, 1, (n, net.channels)).astype(np.float32), gates.astype(np.float32)

    def wanted(self, x: Array, gates: Array) -> tuple[Array, Array]:
        """The results, (tokens, values * size), and the state after the last token, (values, size, size)."""
        net, n = self.net, len(x)
        padded = np.concatenate([np.zeros((net.taps - 1, net.channels)), x.astype(np.float64)])
        x = sum(padded[j : j + n] * self.taps[j] for j in range(net.taps))
        x = x / (1 + np.exp(-x))
        q, k, v = (
            part.reshape(n, -1, net.size)
            for part in np.split(x, [net.keys * net.size, 2 * net.keys * net.size], -1)
        )
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + EPS) for a in (q, k))
        beta, alpha = (gates[:, i, : net.values].astype(np.float64) for i in range(2))
        beta, decay = 1 / (1 + np.exp(-beta)), np.exp(self.decay * np.logaddexp(0, alpha + self.bias))
        state, out = np.zeros((net.values, net.size, net.size)), np.empty((n, net.values, net.size))
        for t in range(n):
            for j in range(net.values):
                query, key = q[t, j % net.keys] * net.size**-0.5, k[t, j % net.keys]
                state[j] *= decay[t, j]
                state[j] += np.outer(key, (v[t, j] - key @ state[j]) * beta[t, j])
                out[t, j] = query @ state[j]
        out = out / np.sqrt((out * out).mean(-1, keepdims=True) + EPS) * self.norm
        return out.reshape(n, -1), state


class Runner:
    """The layer's kernels, with the states of four sequences."""

    def __init__(self, pool: ThreadPool, layer: Layer, tiles: tuple[tuple[int, bool], ...]) -> None:
        net, n = layer.net, 4
        self.layer = layer
        pad = np.zeros(net.gates - net.values)
        weights = [layer.taps, *(np.concatenate([a, pad]) for a in (layer.decay, layer.bias))]
        taps, decay, bias, norm = (memory.array(a, dtypes.float32) for a in (*weights, layer.norm))
        self.x, self.gates, self.out, self.states, inputs = (
            memory.zeros(size, dtypes.float32)
            for size in (
                MOST * net.channels,
                MOST * 2 * net.gates,
                MOST * net.values * net.size,
                n * net.state_size,
                n * net.inputs_size,
            )
        )
        self.step_state, self.slots = (memory.zeros(n, dtypes.int32) for n in (SIZE, 2 * MOST))
        self.steps = {}
        for tile, rows in tiles:
            step = KernelSequence(pool)
            of_step = [*([self.step_state] if tile > 1 else []), self.slots]
            read = *of_step, taps, decay, bias
            step.add(convolve(net, tile, rows), self.x, self.gates, inputs, *read, parts=3)
            read = *of_step, self.x, self.gates, norm
            step.add(delta_net(net, tile, rows), self.out, self.states, *read, parts=3)
            self.steps[tile, rows] = step.compile()

    def run(
        self, x: Array, gates: Array, tile: int, rows: bool = False, sequences: Sequence[int] = (0,)
    ) -> Array:
        n = len(x)
        memory.view(self.x)[: x.size], memory.view(self.gates)[: gates.size] = (
            x.reshape(-1),
            gates.reshape(-1),
        )
        memory.view(self.step_state)[TOKENS] = n
        memory.view(self.slots).reshape(-1, 2)[: len(sequences)] = np.array(sequences)[:, None]
        self.steps[tile, rows]()
        return memory.view(self.out).reshape(MOST, -1)[:n].copy()

    def state(self, sequence: int) -> Array:
        net = self.layer.net
        blocks = memory.view(self.states).reshape(-1, net.values, net.size // net.width, net.size, net.width)
        return blocks[sequence].transpose(0, 2, 1, 3).reshape(net.values, net.size, net.size)


@pytest.mark.parametrize(
    ("lanes", "keys", "values", "size"), [rarely(8, 2, 6, 32), rarely(16, 3, 3, 128), rarely(8, 1, 2, 40)]
)
def test_chunks_of_a_prompt(pool: ThreadPool, lanes: int, keys: int, values: int, size: int) -> None:
    layer = Layer(DeltaHeads(keys, values, size, 4, EPS, lanes))
    runner = Runner(pool, layer, ((1, False), (lanes, False)))
    x, gates = layer.rows(75)
    wanted, state = layer.wanted(x, gates)
    at, got = 0, []
    for n in (2, 24, 1, 1, 1, 3, 24, 19):
        got.append(runner.run(x[at : at + n], gates[at : at + n], 1 if n == 1 else lanes))
        at += n
    np.testing.assert_allclose(np.concatenate(got), wanted, atol=2e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(runner.state(0), state, atol=1e-5 * np.abs(state).max())


@thorough  # tests/targets/test_states.py
def test_several_sequences(pool: ThreadPool) -> None:
    """Prompts of three sequences, then a token of some of them at a time; a fourth one is left alone."""
    layer = Layer(DeltaHeads(2, 4, 32, 4, EPS, 8))
    runner = Runner(pool, layer, ((1, False), (8, False), (4, True)))
    texts = {2: layer.rows(12), 0: layer.rows(11), 1: layer.rows(13)}
    wanted = {sequence: layer.wanted(*text)[0] for sequence, text in texts.items()}
    done = dict.fromkeys(texts, 0)

    def step(order: tuple[int, ...], n: int, tile: int, rows: bool) -> None:
        """n tokens of each sequence."""
        parts = [np.concatenate([texts[s][i][done[s] : done[s] + n] for s in order]) for i in range(2)]
        got = runner.run(*parts, tile, rows, [s for s in order for _ in range(n)])
        want = np.concatenate([wanted[s][done[s] : done[s] + n] for s in order])
        np.testing.assert_allclose(got, want, atol=1e-4)
        for sequence in order:
            done[sequence] += n

    for sequence in texts:
        step((sequence,), 7, 8, False)
    for order in ((0, 2, 1), (1, 0), (2,), (2, 1, 0)):
        step(order, 1, 4, True)
    step((1,), 1, 1, False)
    assert not runner.state(3).any()


def test_gates_far_from_zero(pool: ThreadPool) -> None:
    """Decays of nearly 1, whose logarithm is exact, and of 0."""
    layer = Layer(DeltaHeads(1, 4, 32, 2, EPS, 8))
    layer.decay, layer.bias = np.array([-1e-3, -2.0, -1.0, -16.0]), np.array([-9.0, -12.0, 40.0, 3.0])
    runner = Runner(pool, layer, ((1, False),))
    x, gates = layer.rows(1)
    runner.run(x, gates, 1)
    alpha = gates[0, 1, :4].astype(np.float64) + layer.bias
    decays = memory.view(runner.gates)[8:12].astype(np.float64)
    wanted = np.exp(layer.decay * np.logaddexp(0, alpha))
    np.testing.assert_allclose(decays, wanted, rtol=3e-6, atol=1e-37)
    np.testing.assert_allclose(1 - decays[:2], 1 - wanted[:2], atol=2e-7)
