"""Short convolutions: of each channel the last taps - 1 inputs are kept of a sequence. Steps have rows and slots as
those of delta nets (`kernels.delta_net`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.kernel_builder import Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import TOKENS


@dataclass(frozen=True)
class ConvChannels:
    """So many channels, a multiple of `lanes`, whose convolution reads `taps` tokens. A sequence keeps the inputs that
    its next token reads, float32 (taps - 1, channels)."""

    channels: int
    taps: int
    lanes: int

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return ((self.taps - 1) * self.channels,)


@functools.cache
def short_conv(conv: ConvChannels, tile: int, rows: bool = False) -> KernelFunction:
    """c times the convolution of b v. Buffers: out, float32 (tokens, channels); the layer's inputs; the state if tile
    is more than 1; the slots; b, c and v, float32 (tokens, 3, channels); the weights, float32 (taps, channels)."""
    n, lanes, before = conv.channels, conv.lanes, conv.taps - 1

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, inputs, *step_state, slots, x, weights = buffers
        k = KernelBuilder(lanes)
        for buffer in (out, inputs):
            k.scratch(buffer)
        tokens: Index = k.index(step_state[0], TOKENS) if step_state else 1
        runs, run_tokens = (tokens, 1) if rows else (1, tokens)
        first, count = even_share(n // lanes, part, parts)
        window = k.registers(conv.taps * lanes)  # a ring of the last inputs
        with k.loop(count) as i, k.loop(runs) as run:
            channel = (first + i) * lanes
            kept, left = (k.index(slots, run * 2 + i) * (before * n) + channel for i in range(2))
            with k.loop(before) as tap:
                k.store(window, tap * lanes, k.vector(inputs, kept + tap * n))
            with k.loop(run_tokens) as t:
                at = (run + t) * (3 * n) + channel
                b, c, v = (k.vector(x, at + which * n) for which in range(3))
                places = [(t + tap) % conv.taps * lanes for tap in range(conv.taps)]
                k.store(window, places[-1], b * v)
                total = add(
                    k.vector(window, place) * k.vector(weights, tap * n + channel)
                    for tap, place in enumerate(places)
                )
                k.store(out, (run + t) * n + channel, c * total)
            with k.loop(before) as tap:
                place = (run_tokens + tap) % conv.taps * lanes
                k.store(inputs, left + tap * n, k.vector(window, place))
        return k.finish(f"short_conv_{n}_{tile}")

    assert n % lanes == 0, "channels that are no whole vectors"
    return kernel
