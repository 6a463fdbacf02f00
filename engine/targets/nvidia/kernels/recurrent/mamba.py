"""Mamba 2 layers on a GPU. A step has of each token y * silu(gate), float32 (tokens, width), and `group_norm` norms it
for the last product.

The state of a sequence (`state_memory`) is for each head a matrix (size, dim), then the inputs of the convolution
(`convolved`). Of a prompt, a thread has a column of a head's matrix in registers, and goes over the tokens in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION, PIECE_ROWS, Piece
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.recurrent.convolved import ConvolvedMemory
from engine.targets.nvidia.kernels.recurrent.delta_net import silu
from engine.targets.nvidia.kernels.recurrent.state_memory import sequence_of
from engine.targets.nvidia.kernels.uops import (
    INDEX,
    LOG2_E,
    after_store,
    all_of,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_index,
    load_run,
    registers,
    shared,
    store,
    store_run,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted

MOST_SIZE = 128
"""The most elements of a column of a state, which a thread has in registers."""

_OF_THREAD = 32  # elements of a column that a thread has in a step of one token


@dataclass(frozen=True)
class MambaHeads(ConvolvedMemory):
    """The sizes of `engine.description.recurrent.Mamba`. The rows of the product with the input are the gates, the
    channels (x, B and C), and dt."""

    heads: int
    groups: int
    dim: int
    size: int
    taps: int
    eps: float
    sequences: int = 1
    slots: int = 2

    @property
    def width(self) -> int:
        """Elements of x, over all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:  # type: ignore[override]
        return self.width + 2 * self.groups * self.size

    @property
    def rows(self) -> int:
        return self.width + self.channels + self.heads

    @property
    def first_input(self) -> int:  # type: ignore[override]
        return self.width * self.size

    @property
    def half(self) -> int:
        return self.first_input + (self.taps - 1) * self.channels

    @property
    def name(self) -> str:
        sizes = f"{self.heads}_{self.groups}_{self.dim}_{self.size}_{self.taps}"
        return f"mamba_{sizes}" + f"_of_{self.slots}" * (self.slots > 2)

    def new_input(self, runs: Runs, sums: Sequence[UOp], row: UOp, channel: UOp, valid: UOp) -> UOp:
        return runs.load(sums, None, row, self.width + channel, valid)

    def b_at(self, head: UOp) -> UOp:
        """The first channel of the B of a head; its C is groups * size channels later."""
        return self.width + head // (self.heads // self.groups) * self.size


def _softplus(x: UOp) -> UOp:
    magnitude = x.maximum(x * f32(-1))
    return x.maximum(0.0) + (f32(1) + (magnitude * f32(-LOG2_E)).exp2()).log2() * f32(1 / LOG2_E)


def _exp(x: UOp) -> UOp:
    return (x * f32(LOG2_E)).exp2()


@functools.cache
def mamba(of: MambaHeads, tokens: int = 0) -> Kernel:
    """A layer without its products and its norm, for one token, or for those of `tokens` sequences. A block has a head.
    Buffers: products, float32 (width,) for each token; memory, float32 (memory_size,); rows, the product with the
    input, float32 (rows,) for each token; conv, the weights of the convolution, float32 (channels, taps); conv_bias,
    float32 (channels,); decay, step_bias and skip, float32 (heads,) each; state, that of the step as in
    `delta_decode`."""
    h, dim, size = of, of.dim, of.size
    own = next(n for n in range(min(_OF_THREAD, size), 0, -1) if size % n == 0)
    parts = size // own  # threads that share a column
    threads, n_inputs = dim * parts, dim + 2 * size

    def kernel(
        products: UOp, memory: UOp, rows: UOp, conv: UOp, conv_bias: UOp, decay: UOp, step_bias: UOp, skip: UOp,
        state: UOp,
    ) -> UOp:  # fmt: skip
        thread, head = UOp.special(threads, "lidx0"), UOp.special(h.heads, "gidx0")
        token = UOp.special(tokens, "gidx1") if tokens > 1 else UOp.const(0, INDEX)
        position = load_index(state, token + tokens if tokens else 1, MAX_POSITION)
        sequence = sequence_of(h, state, token + 2 * tokens if tokens else 2)
        live = load(state, token + 3 * tokens).ne(0) if tokens else None
        before, after = h.state_at(position, sequence), h.state_at(position + 1, sequence)
        began, first_row = position > 0, token * h.rows
        column, part = thread % dim, thread // dim
        places = [(head * size + part * own + i) * dim + column for i in range(own)]
        old = [load(memory, before + place, began) for place in places]

        # The convolution of the head's x, and of its group's B and C, which the group's first head keeps.
        inputs, stores, moved = shared(n_inputs, 0), list[UOp](), list[UOp]()
        for first in range(0, n_inputs, threads):
            e = thread + first
            inside = None if first + threads <= n_inputs else e < n_inputs
            of_x, of_b = e < dim, e < dim + size
            in_b = h.b_at(head) + (e - dim).maximum(0)
            in_c = in_b + (h.groups - 1) * size  # e counts B before C
            channel = of_x.where(head * dim + e.minimum(dim - 1), of_b.where(in_b, in_c))
            channel = channel.minimum(h.channels - 1)
            past = all_of(inside, began)
            window = [load(memory, h.input_at(before, k, channel), past) for k in range(h.taps - 1)]
            window.append(load(rows, first_row + h.width + channel, inside))
            weights = load_run(conv, channel * h.taps, h.taps, inside)
            total = chain(x * w for x, w in zip(window, weights, strict=True)) + load(
                conv_bias, channel, inside
            )
            stores.append(store(inputs, e, silu(total), inside))
            is_own = all_of(inside, live, of_x | (head % (h.heads // h.groups)).eq(0))
            moved += [
                store(memory, h.input_at(after, k, channel), window[k + 1], is_own) for k in range(h.taps - 1)
            ]
        inputs = inputs.after(UOp.group(*stores))
        x = load(inputs, column)
        b, c = (load_run(inputs, dim + which * size + part * own, own) for which in (0, 1))
        dt = _softplus(load(rows, first_row + h.width + h.channels + head) + load(step_bias, head))
        factor = _exp(load(decay, head) * dt)
        new = [s * factor + n * (dt * x) for s, n in zip(old, b, strict=True)]
        results = [
            store(memory, after + place, value, live) for place, value in zip(places, new, strict=True)
        ]
        partial = chain(value * n for value, n in zip(new, c, strict=True))
        y = partial
        is_first = None
        if parts > 1:
            sums, is_first = after_store(shared(threads, 1), thread, partial), thread < dim
            y = tree([load(sums, column + k * dim, is_first) for k in range(parts)])
        y = y + load(skip, head) * x
        element = head * dim + column
        gate = silu(load(rows, first_row + element, is_first))
        results.append(store(products, token * h.width + element, y * gate, is_first))
        n_bytes = 8 * h.width * size * max(tokens, 1)
        return finish(f"{h.name}_{h.sequences}_{tokens}", [*moved, *results], n_bytes, n_bytes)

    inputs = "rows", "conv", "conv_bias", "decay", "step_bias", "skip", "state"
    return Kernel(kernel, ("products", "memory"), inputs)


@functools.cache
def convolve_prompt(of: MambaHeads, runs: Runs) -> Kernel:
    """The convolution and SiLU of the channels of pieces of prompts. `runs`: those of the product with the input.
    Buffers: channels, float32 (tokens, channels); memory, which is read; sums, those of each run; prompt, the step's
    state (`pieces`); conv and conv_bias as in `mamba`."""

    def kernel(
        channels: UOp, memory: UOp, sums: Sequence[UOp], prompt: UOp, conv: UOp, conv_bias: UOp
    ) -> UOp:
        channel, ok, row, _, total = of.convolved(runs, memory, sums, prompt, conv)
        total = total + load(conv_bias, channel, ok)
        place = row * of.channels + channel
        return finish(f"{of.name}_convolve_{runs.tokens}", [store(channels, place, silu(total), ok)])

    return Kernel(kernel, ("channels",), ("memory", ("sums", len(runs.sizes)), "prompt", "conv", "conv_bias"))


@functools.cache
def scan_prompt(of: MambaHeads, runs: Runs, several: bool = False, checks: bool = False) -> Kernel:
    """The state over the piece that begins at the first row, or over `several`. If it `checks`, each of its tokens
    leaves a state. Buffers: products, float32 (tokens, width); memory; channels, what `convolve_prompt` has made; sums,
    those of each run of the product with the input; prompt, the step's state; decay, step_bias and skip as in
    `mamba`."""
    h, dim, size, tokens = of, of.dim, of.size, runs.tokens
    units = -(-tokens // PIECE_ROWS) if several else 1
    assert size <= MOST_SIZE and (not checks or h.slots > tokens)

    def kernel(
        products: UOp, memory: UOp, channels: UOp, sums: Sequence[UOp], prompt: UOp, decay: UOp, step_bias: UOp,
        skip: UOp,
    ) -> UOp:  # fmt: skip
        column, head = UOp.special(dim, "lidx0"), UOp.special(h.heads, "gidx0")
        row = UOp.special(units, "gidx1") * PIECE_ROWS if units > 1 else UOp.const(0, INDEX)
        piece = Piece.of(prompt, row, tokens, MAX_POSITION)
        piece = replace(piece, count=piece.first.eq(row).where(piece.count, 0))  # else it is another block's
        position, sequence = piece.position, sequence_of(h, prompt, piece.sequence_at)
        before, after = h.state_at(position, sequence), h.state_at(position + piece.count, sequence)
        places = [(head * size + i) * dim + column for i in range(size)]
        state = registers(size, 0)
        state = state.after(
            UOp.group(*store_run(state, 0, [load(memory, before + p, position > 0) for p in places]))
        )
        step_of, decay_of, skip_of = (load(v, head) for v in (step_bias, decay, skip))
        true = UOp.const(True)

        t = UOp.range(piece.count, 0, AxisType.LOOP)
        at = piece.first + t
        so_far = load_run(state.after(t), 0, size)
        x = load(channels, at * h.channels + head * dim + column)
        first = at * h.channels + h.b_at(head)
        b, c = load_run(channels, first, size), load_run(channels, first + h.groups * size, size)
        dt = _softplus(runs.load(sums, None, at, h.width + h.channels + head, true) + step_of)
        factor, added = _exp(decay_of * dt), dt * x
        new = [s * factor + n * added for s, n in zip(so_far, b, strict=True)]
        y = chain([*(s * n for s, n in zip(new, c, strict=True)), skip_of * x])
        element = head * dim + column
        gate = silu(runs.load(sums, None, at, element, true))
        stores = [*store_run(state, 0, new), store(products, at * h.width + element, y * gate)]
        if checks:
            of_token = h.state_at(position + t + 1, sequence)
            stores += [
                store(memory, of_token + place, value) for place, value in zip(places, new, strict=True)
            ]
        done = UOp.group(*stores).end(t)
        results = [done]
        if not checks:
            final, has_tokens = load_run(state.after(done), 0, size), piece.count > 0
            results = [
                store(memory, after + place, value, has_tokens)
                for place, value in zip(places, final, strict=True)
            ]
        name = f"{h.name}_scan_{h.sequences}_{tokens}" + "_several" * several + "_checks" * checks
        return finish(name, results, 8 * h.width * size, tokens * h.width * size * 4)

    inputs = "channels", ("sums", len(runs.sizes)), "prompt", "decay", "step_bias", "skip"
    return Kernel(kernel, ("products", "memory"), inputs)


@functools.cache
def group_norm(
    of: MambaHeads, tokens: int = 0, order: Order = "columns", out_row: int = 0, has_norm: bool = True
) -> Kernel:
    """The products of tokens normed over each group for the last product, if it `has_norm`. Buffers: out, for one token
    float32, permuted and scaled, else activations, float16 in an `order`, from `out_row` on; products, float32 (tokens,
    width); norm, its weight, float32 (width,); for one token input_scale, the result's, float32 (UNIT,)."""
    n = of.width // of.groups
    threads = min(256, -(-n // 32) * 32)

    def kernel(out: UOp, products: UOp, norm: UOp | None, input_scale: UOp | None) -> UOp:
        thread, group = UOp.special(threads, "lidx0"), UOp.special(of.groups, "gidx0")
        token = UOp.special(tokens, "gidx1") if tokens > 1 else UOp.const(0, INDEX)
        columns = [(thread + i * threads, (i + 1) * threads <= n) for i in range(-(-n // threads))]
        places = [(group * n + e, None if is_whole else e < n) for e, is_whole in columns]
        values = [load(products, token * of.width + column, ok) for column, ok in places]
        factor = None
        if norm is not None:
            sums = after_store(shared(threads, 0), thread, chain(v * v for v in values))
            lane = after_store(
                shared(32, 1),
                thread,
                tree([load(sums, thread + 32 * k, thread < 32) for k in range(threads // 32)]),
                thread < 32,
            )
            factor = inverse_rms(tree(load_run(lane, 0, 32)), n, of.eps)
        stores = []
        for (column, ok), value in zip(places, values, strict=True):
            if norm is not None and factor is not None:
                value = value * factor * load(norm, column, ok)
            if input_scale is None:
                place = PLACES[order](out_row + token, column, of.width)
                stores.append(store(out, place, as_half(value), ok))
            else:
                scaled = value * load(input_scale, column % UNIT, ok)
                stores.append(store(out, permuted(column, of.width), scaled, ok))
        return finish(f"{of.name}_norm_{tokens}_{order}_{out_row}", stores)

    return Kernel(kernel, ("out",), ("products", has_norm and "norm", not tokens and "input_scale"))
