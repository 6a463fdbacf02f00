"""Mamba 2 layers on a GPU. A step has of each token y * silu(gate), float32 (tokens, width), and `group_norm` norms it
for the last product.

The state of a sequence (`state_memory`) is for each head a matrix (size, dim), then the inputs of the convolution
(`convolved`). Of a prompt, a thread has a part of a column of a head's matrix in registers, and goes over the tokens in
order; `group_norm` adds the parts of y, and multiplies by the gates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import NO_HINTS
from engine.targets.nvidia.kernels.pieces import MAX_POSITION, PIECE_ROWS, Piece
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.recurrent.convolved import ConvolvedMemory
from engine.targets.nvidia.kernels.recurrent.delta_net import silu
from engine.targets.nvidia.kernels.recurrent.state_memory import of_a_token, sequence_of
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
    softplus,
    store,
    store_run,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted

_OF_THREAD = 32  # elements of a column that a thread has, at most
_GROUP = 8  # tokens of a prompt whose inputs are loaded at once


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
    def of_thread(self) -> int:
        """Elements of a column that a thread has."""
        return next(n for n in range(min(_OF_THREAD, self.size), 0, -1) if self.size % n == 0)

    @property
    def parts(self) -> int:
        """Threads that share a column."""
        return self.size // self.of_thread

    @property
    def channels(self) -> int:
        return self.width + 2 * self.groups * self.size

    @property
    def rows(self) -> int:
        return self.width + self.channels + self.heads

    @property
    def first_input(self) -> int:
        return self.width * self.size

    @property
    def name(self) -> str:
        sizes = f"{self.heads}_{self.groups}_{self.dim}_{self.size}_{self.taps}"
        return f"mamba_{sizes}" + f"_of_{self.slots}" * (self.slots > 2)

    def new_input(self, runs: Runs, sums: Sequence[UOp], row: UOp, channel: UOp, valid: UOp) -> UOp:
        return runs.load(sums, None, row, self.width + channel, valid)

    def b_at(self, head: UOp) -> UOp:
        """The first channel of the B of a head; its C is groups * size channels later."""
        return self.width + head // (self.heads // self.groups) * self.size


def _exp(x: UOp) -> UOp:
    return (x * f32(LOG2_E)).exp2()


@functools.cache
def mamba(of: MambaHeads, tokens: int = 0) -> Kernel:
    """A layer without its products and its norm, for one token, or for those of `tokens` sequences. A block has a head.
    Buffers: products, float32 (width,) for each token; memory, float32 (memory_size,); rows, the product with the
    input, float32 (rows,) for each token; conv, the weights of the convolution, float32 (channels, taps); conv_bias,
    float32 (channels,); decay, step_bias and skip, float32 (heads,) each; state, that of the step as in
    `delta_decode`."""
    h, dim, size, own, parts = of, of.dim, of.size, of.of_thread, of.parts
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
        dt = softplus(load(rows, first_row + h.width + h.channels + head) + load(step_bias, head))
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
    return Kernel(kernel, ("products", "memory"), inputs, NO_HINTS if tokens else of_a_token(inputs))


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


_Loads = list[tuple[UOp, UOp, UOp | None]]
"""Values that a thread has loaded: the place of each in shared memory, and whether there is one (None: always)."""


@dataclass(frozen=True)
class _Groups:
    """Groups of `n` tokens of a piece, of which the threads of a `head` and a `part` of its columns have what they need
    in shared memory: B, C and x of all tokens, and then dt and the decay of each. A thread has a `column`."""

    of: MambaHeads
    runs: Runs
    n: int
    piece: Piece
    head: UOp
    part: UOp
    column: UOp

    @property
    def _firsts(self) -> tuple[int, int, int, int]:
        """Where B, C, x, and dt and decay begin."""
        own, n = self.of.of_thread, self.n
        return 0, n * own, 2 * n * own, 2 * n * own + n * self.of.dim

    @property
    def span(self) -> int:
        """Elements of a group."""
        return self._firsts[-1] + 2 * self.n

    def loads(self, channels: UOp, sums: Sequence[UOp], step_bias: UOp, decay: UOp, group: UOp) -> _Loads:
        """This thread's part of a group."""
        h, n, piece, column, tokens = self.of, self.n, self.piece, self.column, self.runs.tokens
        own, dim, of_b = h.of_thread, h.dim, h.b_at(self.head) + self.part * h.of_thread
        # Elements, and first channel
        runs_of = ((own, of_b), (own, of_b + h.groups * h.size), (dim, self.head * dim))
        loads: _Loads = []
        for first, (n_elements, channel) in zip(self._firsts, runs_of, strict=False):
            n_items = n * n_elements
            run = 4 if n_elements % 4 == 0 and n_items >= dim * 4 else 1
            for begin in range(0, n_items, dim * run):
                item = begin + column * run
                ok = None if begin + dim * run <= n_items else item < n_items
                t = group * n + item // n_elements
                live = t < piece.count if ok is None else (t < piece.count) & ok
                from_ = (piece.first + t).minimum(tokens - 1) * h.channels + channel + item % n_elements
                loads += [(first + item + k, load(channels, from_ + k, live), ok) for k in range(run)]
        is_token, t = column < n, group * n + column
        at, live = (piece.first + t).minimum(tokens - 1), is_token & (t < piece.count)
        given = self.runs.load(sums, None, at, h.width + h.channels + self.head, live)
        dt = live.where(softplus(given + load(step_bias, self.head)), f32(0))
        place = self._firsts[-1] + column * 2
        return [*loads, (place, dt, is_token), (place + 1, _exp(load(decay, self.head) * dt), is_token)]

    def put(self, array: UOp, half: UOp, loads: _Loads) -> UOp:
        """Stores what was loaded to a half of the memory."""
        return UOp.group(*(store(array, half * self.span + place, value, ok) for place, value, ok in loads))

    def token(self, array: UOp, start: UOp, number: UOp) -> tuple[list[UOp], list[UOp], UOp, UOp, UOp]:
        """B, C, x, dt and the decay of a token of the group that begins at `start`."""
        own, firsts = self.of.of_thread, self._firsts
        b, c = (load_run(array, start + first + number * own, own) for first in firsts[:2])
        x = load(array, start + firsts[2] + number * self.of.dim + self.column)
        dt, factor = load_run(array, start + firsts[3] + number * 2, 2)
        return b, c, x, dt, factor


@functools.cache
def scan_prompt(of: MambaHeads, runs: Runs, several: bool, checks: bool) -> Kernel:
    """The state over the piece that begins at the first row, or over `several`. If it `checks`, each of its tokens
    leaves a state. Buffers: products, what each of the `parts` of the columns adds to the tokens' y, float32 (parts,
    tokens, width); memory; channels, what `convolve_prompt` has made; sums, those of each run of the product with the
    input; prompt, the step's state; decay, step_bias and skip as in `mamba`.

    A block has a head's columns, or a part of each, so that there are many blocks, and a thread has no more of a column
    than its registers hold. What a group of tokens needs is in shared memory, and that of the next group is loaded
    meanwhile. A token after the piece's end has x = 0 and dt = 0, and leaves the state as it is."""
    h, dim, own, tokens, n = of, of.dim, of.of_thread, runs.tokens, 1 if checks else _GROUP
    units = -(-tokens // PIECE_ROWS) if several else 1
    assert not checks or h.slots > tokens

    def kernel(
        products: UOp, memory: UOp, channels: UOp, sums: Sequence[UOp], prompt: UOp, decay: UOp, step_bias: UOp,
        skip: UOp,
    ) -> UOp:  # fmt: skip
        column, block = UOp.special(dim, "lidx0"), UOp.special(h.heads * h.parts, "gidx0")
        head, part = block // h.parts, block % h.parts
        row = UOp.special(units, "gidx1") * PIECE_ROWS if units > 1 else UOp.const(0, INDEX)
        piece = Piece.of(prompt, row, tokens, MAX_POSITION)
        piece = replace(piece, count=piece.first.eq(row).where(piece.count, 0))  # else it is another block's
        position, sequence = piece.position, sequence_of(h, prompt, piece.sequence_at)
        before, after = h.state_at(position, sequence), h.state_at(position + piece.count, sequence)
        places = [(head * h.size + part * own + i) * dim + column for i in range(own)]
        state = registers(own, 0)
        start = store_run(state, 0, [load(memory, before + p, position > 0) for p in places])
        groups = _Groups(h, runs, n, piece, head, part, column)
        loads_of = functools.partial(groups.loads, channels, sums, step_bias, decay)
        array = shared(2 * groups.span, 0)
        ready = UOp.group(groups.put(array, UOp.const(0), loads_of(UOp.const(0))), *start)
        array, state = array.after(ready), state.after(ready)
        skip_of = part.eq(0).where(load(skip, head), f32(0))

        group = UOp.range((piece.count + (n - 1)) // n, 0, AxisType.LOOP)
        following, half = loads_of(group + 1), group % 2 * groups.span
        places_of, values_of, conditions = zip(*following, strict=True)
        loaded = registers(len(following), 1)  # else the compiler loads these after the loop below
        loaded = loaded.after(group, UOp.group(*store_run(loaded.after(group), 0, values_of)))
        # Unrolled, all its loads would come first, and fill the registers.
        of_group = UOp.range(n, 1, AxisType.LOOP)
        held, t = array.after(loaded, of_group), group * n + of_group
        b, c, x, dt, factor = groups.token(held, half, of_group)
        added, old = dt * x, load_run(state.after(group, of_group), 0, own)
        new = [s * factor + w * added for s, w in zip(old, b, strict=True)]
        chains = [[s * w for s, w in zip(new, c, strict=True)][i::4] for i in range(min(4, own))]
        y = tree([chain(terms) for terms in chains]) + skip_of * x
        place = (part * tokens + (piece.first + t).minimum(tokens - 1)) * h.width + head * dim + column
        stores = [*store_run(state, 0, new), store(products, place, y, t < piece.count)]
        if checks:
            of_token = h.state_at(position + t + 1, sequence)
            stores += [store(memory, of_token + p, s) for p, s in zip(places, new, strict=True)]
        scanned = UOp.group(*stores).end(of_group)
        following = [
            *zip(places_of, load_run(loaded.after(scanned), 0, len(following)), conditions, strict=True)
        ]
        results = [done := UOp.group(scanned, groups.put(array, (group + 1) % 2, following)).end(group)]
        if not checks:
            final, has_tokens = load_run(state.after(done), 0, own), piece.count > 0
            results = [store(memory, after + p, s, has_tokens) for p, s in zip(places, final, strict=True)]
        name = f"{h.name}_scan_{h.sequences}_{tokens}" + "_several" * several + "_checks" * checks
        return finish(name, results, 8 * h.width * h.size, tokens * h.width * h.size * 4)

    inputs = "channels", ("sums", len(runs.sizes)), "prompt", "decay", "step_bias", "skip"
    return Kernel(kernel, ("products", "memory"), inputs)


@functools.cache
def group_norm(
    of: MambaHeads, tokens: int = 0, order: Order = "columns", out_row: int = 0, has_norm: bool = True,
    runs: Runs | None = None,
) -> Kernel:  # fmt: skip
    """The products of tokens normed over each group for the last product, if it `has_norm`. Buffers: out, for one token
    float32, permuted and scaled, else activations, float16 in an `order`, from `out_row` on; products, float32 (tokens,
    width), or of prompts, of whose product with the input these are `runs`, those of `scan_prompt`, and sums, those of
    each run; norm, its weight, float32 (width,); for one token input_scale, the result's, float32 (UNIT,)."""
    n = of.width // of.groups
    threads = min(256, -(-n // 32) * 32)

    def kernel(
        out: UOp, products: UOp, sums: Sequence[UOp], norm: UOp | None, input_scale: UOp | None
    ) -> UOp:
        thread, group = UOp.special(threads, "lidx0"), UOp.special(of.groups, "gidx0")
        token = UOp.special(tokens, "gidx1") if tokens > 1 else UOp.const(0, INDEX)
        columns = [(thread + i * threads, (i + 1) * threads <= n) for i in range(-(-n // threads))]
        places = [(group * n + e, None if is_whole else e < n) for e, is_whole in columns]
        values = [load(products, token * of.width + column, ok) for column, ok in places]
        if runs:
            others = range(tokens, of.parts * tokens, tokens)
            true = UOp.const(True)
            values = [
                chain([value, *(load(products, (token + p) * of.width + column, ok) for p in others)])
                * silu(runs.load(sums, None, token, column, true if ok is None else ok))
                for value, (column, ok) in zip(values, places, strict=True)
            ]
        factor = None
        if norm is not None:
            squares = after_store(shared(threads, 0), thread, chain(v * v for v in values))
            lane = after_store(
                shared(32, 1),
                thread,
                tree([load(squares, thread + 32 * k, thread < 32) for k in range(threads // 32)]),
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
        gated = "_gated" * bool(runs)
        return finish(f"{of.name}_norm_{tokens}_{order}_{out_row}{gated}", stores)

    sums = ("sums", len(runs.sizes) if runs else 0)
    return Kernel(kernel, ("out",), ("products", sums, has_norm and "norm", not tokens and "input_scale"))
