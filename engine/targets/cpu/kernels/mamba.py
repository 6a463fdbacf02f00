"""Mamba 2 layers: a causal convolution, and a recurrence with a matrix per head.

    products of gates, channels and steps · mamba_inputs · mamba · gated norm

Steps have rows and slots as those of delta nets (`kernels.delta_net`). The state of a head is a matrix (size,
head_dim), which stays in the L1 cache over all tokens of a chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid, sum_of_squares
from engine.targets.cpu.kernels.convolution import convolve_and_activate
from engine.targets.cpu.kernels.delta_net import softplus
from engine.targets.cpu.kernels.kernel_builder import KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import n_tokens, runs_of


@dataclass(frozen=True)
class MambaHeads:
    """The sizes of `engine.description.recurrent.Mamba`; `head_dim` and `size` are multiples of `lanes`. Of each
    sequence a layer keeps the states, float32 (heads, size, head_dim), and the inputs of the convolution that its next
    token reads, float32 (taps - 1, channels)."""

    heads: int
    groups: int
    head_dim: int
    size: int
    taps: int
    lanes: int

    @property
    def width(self) -> int:
        """Elements of x, over all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of x, B and C."""
        return self.width + 2 * self.groups * self.size

    @property
    def steps(self) -> int:
        """Elements of dt, one for each head, in whole vectors."""
        return -(-self.heads // self.lanes) * self.lanes

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return self.width * self.size, (self.taps - 1) * self.channels


@functools.cache
def mamba_inputs(net: MambaHeads, tile: int, rows: bool) -> KernelFunction:
    """The convolution and SiLU of the channels, and softplus(dt + bias). Buffers: channels, float32 (tokens, channels),
    and dt, float32 (tokens, steps), both changed in place; the layer's inputs; the state if tile is more than 1; the
    slots; the weights of the convolution, float32 (taps, channels), and its biases, float32 (channels,); the biases of
    dt, float32 (steps,)."""
    n, lanes = net.channels, net.lanes

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        x, dt, inputs, *step_state, slots, weights, bias, step_bias = buffers
        k = KernelBuilder(lanes)
        for buffer in (x, dt, inputs):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        convolve_and_activate(
            k,
            (n, net.taps, lanes),
            even_share(n // lanes, part, parts),
            (runs, run_tokens),
            (inputs, slots, weights),
            x,
            bias,
        )
        first, count = even_share(runs if rows else run_tokens, part, parts)
        with k.loop(count) as i, k.loop(net.steps // lanes) as j:
            at = (first + i) * net.steps + j * lanes
            k.store(dt, at, softplus(k, k.vector(dt, at) + k.vector(step_bias, j * lanes)))
        return k.finish(f"mamba_inputs_{n}_{tile}")

    assert n % lanes == 0, "channels that are no whole vectors"
    return kernel


@functools.cache
def mamba(net: MambaHeads, tile: int, rows: bool = False) -> KernelFunction:
    """For each token S = exp(decay dt) S + B (dt x)^T; out = S^T C + skip x, of each head. Buffers: out, float32
    (tokens, width); the layer's states; the state if tile is more than 1; the slots; what `mamba_inputs` has made of
    channels and of dt; decay and skip, float32 (heads,) each."""
    dim, size, lanes = net.head_dim, net.size, net.lanes
    vectors, shared_by = dim // lanes, net.heads // net.groups

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, states, *step_state, slots, x, dt, decay, skip = buffers
        k = KernelBuilder(lanes)
        for buffer in (out, states):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        first, count = even_share(net.heads, part, parts)
        decays = k.registers(lanes)
        with k.loop(count) as i, k.loop(runs) as run:
            head = first + i
            before, after = (k.index(slots, run * 2 + i) for i in range(2))
            with k.loop(run_tokens) as t:
                token = run + t
                state, left = (slot * (net.width * size) + head * (size * dim) for slot in (before, after))
                row = token * net.channels
                b = row + net.width + head // shared_by * size
                c = b + net.groups * size
                step = k.load(dt, token * net.steps + head)
                k.fill(decays, 0, k.load(decay, head) * step)
                k.store(decays, 0, k.exp(k.vector(decays, 0)))
                factor = k.load(decays, 0)
                sums = [k.zeros() for _ in range(vectors)]
                with k.loop(size) as n:
                    added, read = k.load(x, b + n) * step, k.load(x, c + n)
                    for v, s in enumerate(sums):
                        at = n * dim + v * lanes
                        value = k.vector(x, row + head * dim + v * lanes)
                        new = k.vector(states, state + at) * factor + value * added
                        k.store(states, left + at, new)
                        k.store(s, 0, k.vector(s, 0) + new * read)
                for v, s in enumerate(sums):
                    at = head * dim + v * lanes
                    value = k.vector(x, row + at)
                    k.store(out, token * net.width + at, k.vector(s, 0) + value * k.load(skip, head))
        return k.finish(f"mamba_{net.heads}_{dim}_{size}_{tile}")

    assert dim % lanes == 0, "heads that are no whole vectors"
    return kernel


@functools.cache
def gated_norm(net: MambaHeads, eps: float, tile: int) -> KernelFunction:
    """y = norm(y * silu(gate)) * weight, normed over the elements of a group. Buffers: y, float32 (tokens, width); the
    state if tile is more than 1; the gates, float32 (tokens, width); the weight, float32 (width,)."""
    lanes, of_group = net.lanes, net.width // net.groups

    def kernel(part: UOp, parts: UOp, y: UOp, *buffers: UOp) -> UOp:
        *state, gates, weight = buffers
        k = KernelBuilder(lanes)
        k.scratch(y)
        tokens = n_tokens(k, state[0], tile) if state else 1
        first, count = even_share(tokens * net.groups, part, parts)
        factor = k.registers(1)
        with k.loop(count) as i:
            at, in_weight = (first + i) * of_group, (first + i) % net.groups * of_group
            with k.loop(of_group // lanes) as j:
                gate = k.vector(gates, at + j * lanes)
                k.store(y, at + j * lanes, k.vector(y, at + j * lanes) * gate * sigmoid(k, gate))
            mean = sum_of_squares(k, y, at, of_group, lanes) * (1 / of_group)
            k.store(factor, 0, (mean + eps).sqrt().reciprocal())
            with k.loop(of_group // lanes) as j:
                value = k.vector(y, at + j * lanes) * k.load(factor, 0)
                k.store(y, at + j * lanes, value * k.vector(weight, in_weight + j * lanes))
        return k.finish(f"mamba_norm_{net.width}_{net.groups}_{tile}")

    return kernel
