"""Gates of attention that are no sigmoids of each element of its result."""

from __future__ import annotations

import functools
from math import gcd

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid
from engine.targets.cpu.kernels.delta_net import softplus
from engine.targets.cpu.kernels.kernel_builder import KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import n_tokens


@functools.cache
def scale_heads(
    count: int, each: int, stride: int, is_softplus: bool, lanes: int, tile: int
) -> KernelFunction:
    """Multiplies `count` runs of `each` elements by the softplus or the sigmoid of a number. The threads share the
    tokens. Buffers: the runs, float32 (tokens, count * each); the state if tile is more than 1; the numbers, float32
    (tokens, stride)."""
    n = gcd(each, lanes)

    def kernel(part: UOp, parts: UOp, runs: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(runs)
        *state, gates = buffers
        first, tokens = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        factor = k.registers(1)
        with k.loop(tokens) as i, k.loop(count) as run:
            gate = k.load(gates, (first + i) * stride + run)
            k.store(factor, 0, softplus(k, gate) if is_softplus else sigmoid(k, gate))
            at = ((first + i) * count + run) * each
            with k.loop(each // n) as j:
                k.store(runs, at + j * n, k.vector(runs, at + j * n, n) * k.load(factor, 0))
        return k.finish(f"scale_heads_{count}_{tile}")

    return kernel
