"""Short convolutions on a GPU, whose state is the inputs of a convolution (`convolved`).

A token's product with the input has b, c and v of all channels; the inputs of the convolution are b v.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.recurrent.convolved import ConvolvedMemory
from engine.targets.nvidia.kernels.recurrent.state_memory import sequence_of
from engine.targets.nvidia.kernels.uops import INDEX, all_of, chain, finish, load, load_index, load_run, store
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted


@dataclass(frozen=True)
class ConvMemory(ConvolvedMemory):
    width: int
    taps: int
    sequences: int = 1
    slots: int = 2

    @property
    def channels(self) -> int:
        return self.width

    @property
    def rows(self) -> int:
        """Rows of the product with the input."""
        return 3 * self.channels

    @property
    def name(self) -> str:
        return f"conv_{self.channels}_{self.taps}" + f"_of_{self.slots}" * (self.slots > 2)

    def new_input(self, runs: Runs, sums: Sequence[UOp], row: UOp, channel: UOp, valid: UOp) -> UOp:
        b, v = (runs.load(sums, None, row, which * self.channels + channel, valid) for which in (0, 2))
        return b * v


@functools.cache
def short_conv(of: ConvMemory, tokens: int = 0, order: Order = "columns", out_row: int = 0) -> Kernel:
    """A convolution of one token, or of those of `tokens` sequences. Buffers: out, for one token float32, permuted and
    scaled for the next product, else its activations, float16 in an `order`, from `out_row` on; memory, float32
    (memory_size,); rows, the product with the input, float32 (rows,) for each token; conv, the weights, float32
    (channels, taps); state, that of the step as in `delta_decode`; for one token input_scale, the result's, float32
    (UNIT,)."""
    n = of.channels

    def kernel(out: UOp, memory: UOp, rows: UOp, conv: UOp, state: UOp, input_scale: UOp | None) -> UOp:
        channel, ok = of.channel
        token = UOp.special(tokens, "gidx1") if tokens > 1 else UOp.const(0, INDEX)
        position = load_index(state, token + tokens if tokens else 1, MAX_POSITION)
        sequence = sequence_of(of, state, token + 2 * tokens if tokens else 2)
        live = all_of(ok, load(state, token + 3 * tokens).ne(0) if tokens else None)
        before, after = of.state_at(position, sequence), of.state_at(position + 1, sequence)
        b, c, v = (load(rows, token * of.rows + which * n + channel, ok) for which in range(3))
        past = all_of(ok, position > 0)
        window = [load(memory, of.input_at(before, k, channel), past) for k in range(of.taps - 1)] + [b * v]
        weights = load_run(conv, channel * of.taps, of.taps, ok)
        result = c * chain(x * w for x, w in zip(window, weights, strict=True))
        stores = [
            store(memory, of.input_at(after, k, channel), window[k + 1], live) for k in range(of.taps - 1)
        ]
        if input_scale is None:
            stores.append(store(out, PLACES[order](out_row + token, channel, n), as_half(result), ok))
        else:
            scaled = result * load(input_scale, channel % UNIT, ok)
            stores.append(store(out, permuted(channel, n), scaled, ok))
        return finish(f"short_{of.name}_{of.sequences}_{tokens}_{order}_{out_row}", stores)

    inputs = "rows", "conv", "state", not tokens and "input_scale"
    return Kernel(kernel, ("out", "memory"), inputs)


@functools.cache
def short_conv_prompt(of: ConvMemory, runs: Runs, order: Order) -> Kernel:
    """The convolution of pieces of prompts. `runs`: those of the product with the input. Buffers: out, activations,
    float16 in an `order`; memory, which is read; sums, those of each run; prompt, the step's state (`pieces`); conv,
    the weights, float32 (channels, taps)."""

    def kernel(out: UOp, memory: UOp, sums: Sequence[UOp], prompt: UOp, conv: UOp) -> UOp:
        channel, ok, row, valid, total = of.convolved(runs, memory, sums, prompt, conv)
        result = runs.load(sums, None, row, of.channels + channel, valid) * total
        place = PLACES[order](row, channel, of.channels)
        return finish(f"short_{of.name}_prompt_{runs.tokens}", [store(out, place, as_half(result), ok)])

    return Kernel(kernel, ("out",), ("memory", ("sums", len(runs.sizes)), "prompt", "conv"))
