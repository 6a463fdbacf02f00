"""Mamba layers: a causal convolution, and a recurrence of each channel.

    products of channels and gates · scan_inputs · products of low, B and C · norm_run · product of dt · selective_scan

Steps have rows and slots as those of delta nets (`kernels.delta_net`). The states of a vector of channels stay in the
L1 cache over all tokens of a chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.convolution import convolve_and_activate
from engine.targets.cpu.kernels.delta_net import softplus
from engine.targets.cpu.kernels.kernel_builder import KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import n_tokens, runs_of


@dataclass(frozen=True)
class ScanSizes:
    """The sizes of `engine.description.recurrent.SelectiveScan`; `width` is a multiple of `lanes`, and so is `of_head`,
    the channels that have the same product of dt, if that is not 1. Of each sequence a layer keeps the states, float32
    (size, width), and the inputs of the convolution that its next token reads, float32 (taps - 1, width)."""

    width: int
    size: int
    taps: int
    lanes: int
    of_head: int = 1

    @property
    def steps(self) -> int:
        """Products of dt of a token, with those that fill the last vector."""
        count = self.width // self.of_head
        return -(-count // self.lanes) * self.lanes

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return self.width * self.size, (self.taps - 1) * self.width


@functools.cache
def scan_inputs(net: ScanSizes, tile: int, rows: bool) -> KernelFunction:
    """The convolution and SiLU of the channels. Buffers: channels, float32 (tokens, width), changed in place; the
    layer's inputs; the state if tile is more than 1; the slots; the weights of the convolution, float32 (taps, width),
    and its biases, float32 (width,)."""
    n, lanes = net.width, net.lanes

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        x, inputs, *step_state, slots, weights, bias = buffers
        k = KernelBuilder(lanes)
        for buffer in (x, inputs):
            k.scratch(buffer)
        runs = runs_of(k, step_state, rows)
        convolve_and_activate(
            k,
            (n, net.taps, lanes),
            even_share(n // lanes, part, parts),
            runs,
            (inputs, slots, weights),
            x,
            bias,
        )
        return k.finish(f"scan_inputs_{n}_{tile}")

    return kernel


@functools.cache
def norm_run(n: int, eps: float, lanes: int, tile: int) -> KernelFunction:
    """y = norm(y) * weight. Buffers: y, float32 (tokens, n), changed in place; the state if tile is more than 1; the
    weight, float32 (n,)."""

    def kernel(part: UOp, parts: UOp, y: UOp, *buffers: UOp) -> UOp:
        *state, weight = buffers
        k = KernelBuilder(lanes)
        k.scratch(y)
        first, count = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        with k.loop(count) as i:
            row, total = (first + i) * n, k.zeros(1)
            with k.loop(n) as j:
                value = k.load(y, row + j)
                k.store(total, 0, k.load(total, 0) + value * value)
            k.store(total, 0, (k.load(total, 0) * (1 / n) + eps).sqrt().reciprocal())
            with k.loop(n) as j:
                k.store(y, row + j, k.load(y, row + j) * k.load(total, 0) * k.load(weight, j))
        return k.finish(f"norm_run_{n}_{tile}")

    return kernel


@functools.cache
def selective_scan(net: ScanSizes, tile: int, rows: bool = False) -> KernelFunction:
    """For each token S = exp(decay dt) S + B (dt u)^T; out = S^T C + skip u. Buffers: out, float32 (tokens, width); the
    layer's states; the state if tile is more than 1; the slots; u, float32 (tokens, width); the products of dt, float32
    (tokens, width / of_head); B and C, float32 (tokens, size) each; the biases of dt, float32 (width,); decay, float32
    (size, width); skip, float32 (width,)."""
    width, size, lanes = net.width, net.size, net.lanes

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, states, *step_state, slots, u, steps, b, c, step_bias, decay, skip = buffers
        k = KernelBuilder(lanes)
        for buffer in (out, states):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        first, count = even_share(width // lanes, part, parts)
        state, total = k.registers(size * lanes), k.registers(lanes)
        with k.loop(count) as i, k.loop(runs) as run:
            channel = (first + i) * lanes
            before, after = (k.index(slots, run * 2 + i) * (size * width) + channel for i in range(2))
            with k.loop(size) as n:
                k.store(state, n * lanes, k.vector(states, before + n * width))
            with k.loop(run_tokens) as t:
                token = run + t
                at = token * width + channel
                value = k.vector(u, at)
                if net.of_head > 1:
                    product = k.load(steps, token * net.steps + channel // net.of_head)
                else:
                    product = k.vector(steps, at)
                dt = softplus(k, product + k.vector(step_bias, channel))
                k.store(total, 0, value * k.vector(skip, channel))
                with k.loop(size) as n:
                    kept = k.exp(dt * k.vector(decay, n * width + channel)) * k.vector(state, n * lanes)
                    new = kept + dt * value * k.load(b, token * size + n)
                    k.store(state, n * lanes, new)
                    k.store(total, 0, k.vector(total, 0) + new * k.load(c, token * size + n))
                k.store(out, at, k.vector(total, 0))
            with k.loop(size) as n:
                k.store(states, after + n * width, k.vector(state, n * lanes))
        return k.finish(f"selective_scan_{width}_{size}_{net.of_head}_{tile}")

    return kernel
