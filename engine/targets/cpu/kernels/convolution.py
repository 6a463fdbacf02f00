"""A causal convolution of each channel over the tokens of sequences, of which the last inputs are kept."""

from __future__ import annotations

from collections.abc import Callable

from tinygrad import UOp

from engine.targets.cpu.kernels.activations import sigmoid
from engine.targets.cpu.kernels.kernel_builder import Index, KernelBuilder, add


def convolve_channels(
    k: KernelBuilder,
    sizes: tuple[int, int, int],
    share: tuple[Index, Index],
    runs: tuple[Index, Index],
    buffers: tuple[UOp, UOp, UOp],
    new_input: Callable[[Index, Index], UOp],
    put: Callable[[Index, Index, UOp], None],
) -> None:
    """`sizes`: channels, taps and lanes. `share`: the first vector of channels of a thread, and how many. `runs`: the
    sequences, and the tokens of each. `buffers`: the inputs that are kept, float32 (taps - 1, channels) a slot; the
    slots, of each run where its inputs are read and where they are left; the weights, float32 (taps, channels).

    `new_input` gives a token's input at a channel, a vector, and `put` takes the convolution there."""
    n, taps, lanes = sizes
    (first, count), (n_runs, run_tokens), (inputs, slots, weights) = share, runs, buffers
    before, window = taps - 1, k.registers(taps * lanes)  # a ring of the last inputs
    with k.loop(count) as i, k.loop(n_runs) as run:
        channel = (first + i) * lanes
        kept, left = (k.index(slots, run * 2 + i) * (before * n) + channel for i in range(2))
        with k.loop(before) as tap:
            k.store(window, tap * lanes, k.vector(inputs, kept + tap * n))
        with k.loop(run_tokens) as t:
            places = [(t + tap) % taps * lanes for tap in range(taps)]
            k.store(window, places[-1], new_input(run + t, channel))
            total = add(
                k.vector(window, place) * k.vector(weights, tap * n + channel)
                for tap, place in enumerate(places)
            )
            put(run + t, channel, total)
        with k.loop(before) as tap:
            place = (run_tokens + tap) % taps * lanes
            k.store(inputs, left + tap * n, k.vector(window, place))


def convolve_and_activate(
    k: KernelBuilder,
    sizes: tuple[int, int, int],
    share: tuple[Index, Index],
    runs: tuple[Index, Index],
    buffers: tuple[UOp, UOp, UOp],
    x: UOp,
    bias: UOp,
) -> None:
    """x = silu(convolution of x + bias), in place. x: float32 (tokens, channels); bias: float32 (channels,). The other
    arguments are those of `convolve_channels`."""

    def put(token: Index, channel: Index, total: UOp) -> None:
        total = total + k.vector(bias, channel)
        k.store(x, token * sizes[0] + channel, total * sigmoid(k, total))

    convolve_channels(
        k, sizes, share, runs, buffers, lambda token, channel: k.vector(x, token * sizes[0] + channel), put
    )
