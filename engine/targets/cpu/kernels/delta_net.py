"""Gated delta nets: a causal convolution of queries, keys and values, and a recurrence with a matrix per value head.

    products of queries, keys, values, beta and alpha · convolve · delta_net · gate

The state of a head is a matrix (keys, values) whose columns do not depend on one another. So a task takes `width`
columns, which stay in the L1 cache over all tokens of a chunk: each token reads them twice and writes them once. Chunks
of every length do the same arithmetic in the same order.

The tokens of a step are those of a prompt, or `rows` of different sequences, each with a state of its own. Rows of one
sequence follow each other: then each leaves its state to the next one, in a slot of its own (`CPUStates`). `slots`,
int32 (rows, 2), has the slot that a row, or a prompt, reads and the one that it writes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid, sum_of_squares
from engine.targets.cpu.kernels.kernel_builder import F32, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import runs_of

_MAX_WIDTH = 32  # columns of a state of 128 keys: 16 KB
_CHAINS = 2  # independent sums, since each addition waits for the one before


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a kind of layers: `keys` heads of queries and as many of keys, `values` heads of values, all of
    `size` elements, a multiple of `lanes`. Value head j reads key head j mod `keys`; unless it `shares_in_turn`,
    j * keys // values. `taps`: the tokens that a convolution reads. In `keyed` ones each element of a key has a decay
    of its own, with a `bound` of its logarithm (`recurrent.KeyedDeltaNet` of the description).

    Of each sequence a layer keeps the states, float32 (values, size / width, size, width), and the inputs of the
    convolution that its next token reads, float32 (taps - 1, channels)."""

    keys: int
    values: int
    size: int
    taps: int
    eps: float
    lanes: int
    shares_in_turn: bool = True
    keyed: bool = False
    bound: float = 0.0

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values together."""
        return (2 * self.keys + self.values) * self.size

    def key_head(self, head: UOp) -> UOp:
        """The key head that a value head shares."""
        return head % self.keys if self.shares_in_turn else head // (self.values // self.keys)

    @property
    def gates(self) -> int:
        """Elements of beta, one for each value head, in whole vectors."""
        return -(-self.values // self.lanes) * self.lanes

    @property
    def decays(self) -> int:
        """Elements of alpha, of which the decays are made."""
        return self.keys * self.size if self.keyed else self.gates

    @property
    def width(self) -> int:
        """Columns of a state that lie together."""
        return max(n for n in range(self.lanes, _MAX_WIDTH + 1, self.lanes) if self.size % n == 0)

    @property
    def state_size(self) -> int:
        """Elements of the states of a sequence."""
        return self.values * self.size * self.size

    @property
    def inputs_size(self) -> int:
        """Elements of the inputs that are kept of a sequence."""
        return (self.taps - 1) * self.channels

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return self.state_size, self.inputs_size


@functools.cache
def convolve(net: DeltaHeads, tile: int, rows: bool = False) -> KernelFunction:
    """The convolution, SiLU, and the norms of queries and keys; queries are multiplied by size ** -0.5. beta becomes
    sigmoid(beta), and alpha exp(decay * softplus(alpha + bias)), or exp(bound * sigmoid(decay * (alpha + bias))).
    Buffers: queries, keys and values, float32 (tokens, channels), and beta and alpha, float32 (tokens, gates + decays),
    both changed in place; the layer's inputs; the state if tile is more than 1; the slots; the weights of the
    convolution, float32 (taps, channels); decay and bias, float32 (decays,) each."""
    size, lanes, before = net.size, net.lanes, net.taps - 1
    vectors = size // lanes

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        x, gates, inputs, *step_state, slots, weights, decay, bias = buffers
        k = KernelBuilder(lanes)
        for buffer in (x, gates, inputs):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        first, count = even_share(2 * net.keys + net.values, part, parts)
        window = k.registers(net.taps * size)  # a ring of the last inputs of a head
        activated, squares = k.registers(size), k.registers(lanes)
        with k.loop(count) as i, k.loop(runs) as run:
            head = first + i
            kept, left = (k.index(slots, run * 2 + i) * net.inputs_size + head * size for i in range(2))
            with k.loop(before) as tap, k.loop(vectors) as j:
                v = k.vector(inputs, kept + tap * net.channels + j * lanes)
                k.store(window, tap * size + j * lanes, v)
            with k.loop(run_tokens) as t:
                at = (run + t) * net.channels + head * size
                slots = [(t + tap) % net.taps * size for tap in range(net.taps)]
                k.fill(squares, 0, UOp.const(0.0, F32))
                with k.loop(vectors) as j:
                    k.store(window, slots[-1] + j * lanes, k.vector(x, at + j * lanes))
                    total = add(
                        k.vector(window, slot + j * lanes)
                        * k.vector(weights, tap * net.channels + head * size + j * lanes)
                        for tap, slot in enumerate(slots)
                    )
                    total = total * sigmoid(k, total)
                    k.store(activated, j * lanes, total)
                    k.store(squares, 0, k.vector(squares, 0) + total * total)
                length = (k.across(k.vector(squares, 0), Ops.ADD) + net.eps).sqrt()
                factor = length.reciprocal() * (head < net.keys).where(UOp.const(size**-0.5, F32), 1.0)
                factor = (head < 2 * net.keys).where(factor, 1.0)
                with k.loop(vectors) as j:
                    k.store(x, at + j * lanes, k.vector(activated, j * lanes) * factor)
            with k.loop(before) as tap, k.loop(vectors) as j:
                slot = (run_tokens + tap) % net.taps * size
                v = k.vector(window, slot + j * lanes)
                k.store(inputs, left + tap * net.channels + j * lanes, v)
        first, count = even_share(runs if rows else run_tokens, part, parts)
        with k.loop(count) as i:
            at = (first + i) * (net.gates + net.decays)
            with k.loop(net.gates // lanes) as j:
                k.store(gates, at + j * lanes, sigmoid(k, k.vector(gates, at + j * lanes)))
            with k.loop(net.decays // lanes) as j:
                place = at + net.gates + j * lanes
                rate, alpha = k.vector(decay, j * lanes), k.vector(gates, place) + k.vector(bias, j * lanes)
                log = sigmoid(k, rate * alpha) * net.bound if net.bound else rate * softplus(k, alpha)
                k.store(gates, place, k.exp(log))
        return k.finish(f"convolve_{net.keys}_{net.values}_{size}_{tile}")

    assert vectors * lanes == size, "heads that are no whole vectors"
    return kernel


@functools.cache
def delta_net(net: DeltaHeads, tile: int, rows: bool = False) -> KernelFunction:
    """For each token S *= decay; S += k (beta * (v - S^T k))^T; out = norm(S^T q) * weight, of each value head.
    Buffers: out, float32 (tokens, values * size); the layer's states; the state if tile is more than 1; the slots;
    what `convolve` has made of queries, keys and values, and of beta and alpha; the weight of the norm, float32
    (size,)."""
    size, lanes, width = net.size, net.lanes, net.width
    vectors, blocks = width // lanes, size // width

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, states, *step_state, slots, x, gates, weight = buffers
        k = KernelBuilder(lanes)
        for buffer in (out, states):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        first, count = even_share(net.values, part, parts)
        new, factor = k.registers(width), k.registers(1)
        with k.loop(count) as i, k.loop(runs) as run:
            head = first + i
            before, after = (k.index(slots, run * 2 + i) for i in range(2))
            with k.loop(blocks) as block, k.loop(run_tokens) as t:
                token = run + t
                state, left = (
                    ((slot * net.values + head) * blocks + block) * (size * width) for slot in (before, after)
                )
                query = token * net.channels + net.key_head(head) * size
                column = head * size + block * width
                of_token = token * (net.gates + net.decays)
                beta = k.load(gates, of_token + head)
                decays = of_token + net.gates + head * (size if net.keyed else 1)
                decay = UOp.const(1.0, F32) if net.keyed else k.load(gates, decays)
                sums = [k.zeros() for _ in range(_CHAINS * vectors)]
                with k.loop(size // _CHAINS) as step:
                    for c in range(_CHAINS):
                        row = step * _CHAINS + c
                        key = k.load(x, query + net.keys * size + row)
                        if net.keyed:
                            key = key * k.load(gates, decays + row)
                        for v in range(vectors):
                            s = sums[c * vectors + v]
                            k.store(
                                s, 0, k.vector(s, 0) + k.vector(states, state + row * width + v * lanes) * key
                            )
                for v in range(vectors):
                    value = k.vector(x, token * net.channels + 2 * net.keys * size + column + v * lanes)
                    predicted = add(k.vector(sums[c * vectors + v], 0) for c in range(_CHAINS))
                    k.store(new, v * lanes, (value - predicted * decay) * beta)
                sums = [k.zeros() for _ in range(_CHAINS * vectors)]
                with k.loop(size // _CHAINS) as step:
                    for c in range(_CHAINS):
                        row = step * _CHAINS + c
                        q, key = k.load(x, query + row), k.load(x, query + net.keys * size + row)
                        left_of = k.load(gates, decays + row) if net.keyed else decay
                        for v in range(vectors):
                            s, at = sums[c * vectors + v], row * width + v * lanes
                            old = k.vector(states, state + at)
                            changed = old * left_of + k.vector(new, v * lanes) * key
                            k.store(states, left + at, changed)
                            k.store(s, 0, k.vector(s, 0) + changed * q)
                for v in range(vectors):
                    total = add(k.vector(sums[c * vectors + v], 0) for c in range(_CHAINS))
                    k.store(out, token * (net.values * size) + column + v * lanes, total)
            with k.loop(run_tokens) as t:
                at = (run + t) * (net.values * size) + head * size
                mean = sum_of_squares(k, out, at, size, lanes) * (1 / size)
                k.store(factor, 0, (mean + net.eps).sqrt().reciprocal())
                with k.loop(size // lanes) as j:
                    v = k.vector(out, at + j * lanes)
                    k.store(out, at + j * lanes, v * k.load(factor, 0) * k.vector(weight, j * lanes))
        return k.finish(f"delta_net_{net.keys}_{net.values}_{size}_{tile}")

    return kernel


def softplus(k: KernelBuilder, x: UOp) -> UOp:
    """ln(1 + e**x) = max(x, 0) + ln(1 + z), z = e**-|x|, and ln(1 + z) = 2 artanh(z / (2 + z)). The relative error is
    1e-6, also where the result is small."""
    z = k.exp(x.maximum(x * -1.0) * -1.0)
    s = z * (z + 2.0).reciprocal()
    square = s * s
    p = UOp.const(2 / 13, F32)
    for n in (11, 9, 7, 5, 3, 1):
        p = p * square + 2 / n
    return x.maximum(UOp.const(0.0, F32)) + s * p
