"""Short convolutions: of each channel the last taps - 1 inputs are kept of a sequence. Steps have rows and slots as
those of delta nets (`kernels.delta_net`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.convolution import convolve_channels
from engine.targets.cpu.kernels.kernel_builder import Index, KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import runs_of


@dataclass(frozen=True)
class ConvChannels:
    """`channels`, a multiple of `lanes`, whose convolution reads `taps` tokens. A sequence keeps the inputs that
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
    n, lanes = conv.channels, conv.lanes

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, inputs, *step_state, slots, x, weights = buffers
        k = KernelBuilder(lanes)
        for buffer in (out, inputs):
            k.scratch(buffer)
        runs = runs_of(k, step_state, rows)

        def part_of(which: int, token: Index, channel: Index) -> UOp:
            return k.vector(x, token * (3 * n) + channel + which * n)

        convolve_channels(
            k, (n, conv.taps, lanes), even_share(n // lanes, part, parts), runs, (inputs, slots, weights),
            lambda *at: part_of(0, *at) * part_of(2, *at),
            lambda token, channel, total: k.store(
                out, token * n + channel, part_of(1, token, channel) * total
            ),
        )  # fmt: skip
        return k.finish(f"short_conv_{n}_{tile}")

    assert n % lanes == 0, "channels that are no whole vectors"
    return kernel
