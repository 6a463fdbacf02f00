"""A gated delta net of one new token in decode: convolution, state, norm and gate in one kernel.

A block has a value head, or one of `parts` equal parts of the columns of its state; then the next product norms the
results (`delta_net.HeadNorm`). Each thread has the elements of some keys and four columns in registers; they are loaded
before everything else. What the keys give is added up in shared memory once, for both products with the state: the new
state is decay * S + k d, so its product with q is decay * S q + (k q) d.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import NO_HINTS
from engine.targets.nvidia.kernels.pieces import MAX_POSITION
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.recurrent.delta_net import DeltaHeads, convolved, decay_of, silu
from engine.targets.nvidia.kernels.recurrent.state_memory import of_a_token, sequence_of
from engine.targets.nvidia.kernels.uops import (
    INDEX,
    after_store,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_index,
    load_run,
    registers,
    shared,
    sigmoid,
    store,
    store_run,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted


def total_of(parts: UOp, n: int, stride: int, count: int, thread: UOp, threads: int, slot: int) -> UOp:
    """Shared memory with `count` sums of `n` parts each, `stride` apart, that the `threads` of a block add."""
    totals, stores = shared(count, slot), []
    for first in range(0, count, threads):
        item = thread + first
        ok = None if first + threads <= count else item < count
        stores.append(store(totals, item, tree([load(parts, item + k * stride, ok) for k in range(n)]), ok))
    return totals.after(UOp.group(*stores))


def parts_of(heads: DeltaHeads, multiprocessors: int) -> int:
    """The blocks that share a head in a step of one token: as many as all multiprocessors have at once."""
    fits = heads.size % UNIT == 0
    return next((n for n in (4, 2) if fits and n * heads.value <= multiprocessors), 1)


class _DecodeBlock:
    """A block of `delta_decode`, for one token: the `part`-th of a head's state, which is `width` columns from
    `first_column` on. A thread has four columns of `per` keys, those of its `group`."""

    def __init__(
        self, heads: DeltaHeads, tokens: int, parts: int, memory: UOp, rows: UOp, state: UOp
    ) -> None:
        h, size = heads, heads.size
        self.heads, self.parts, self.memory, self.rows = heads, parts, memory, rows
        self.width, self.per = size // parts, 8 if size >= 64 else 4
        self.quads, self.groups = self.width // 4, size // self.per
        self.threads = self.quads * self.groups
        self.thread = UOp.special(self.threads, "lidx0")
        self.number = UOp.special(h.value * parts * max(tokens, 1), "gidx0")
        self.token, self.head = UOp.const(0, INDEX), self.number // parts
        if tokens:
            self.token, self.head = self.number // h.value, self.number % h.value
        self.part = self.number % parts if parts > 1 else UOp.const(0, INDEX)
        self.first_column = self.part * self.width
        position = load_index(state, self.token + tokens if tokens else 1, MAX_POSITION)
        sequence = sequence_of(h, state, self.token + 2 * tokens if tokens else 2)
        self.live = load(state, self.token + 3 * tokens).ne(0) if tokens else None
        self.before, self.after = h.state_at(position, sequence), h.state_at(position + 1, sequence)
        self.began, self.first_row, self.key_head = position > 0, self.token * h.rows, h.key_head(self.head)
        self.group, self.quad = self.thread // self.quads, self.thread % self.quads
        self.places = [
            (self.head * size + self.group * self.per + i) * size + self.first_column + self.quad * 4
            for i in range(self.per)
        ]
        self.has_column = None if self.threads == self.width else self.thread < self.width

    def inputs(self, conv: UOp) -> tuple[UOp, list[UOp], list[UOp]]:
        """The head's query, key and value after the convolution, in shared memory, of which a part has its own columns;
        this thread's part of the state; and the stores that move the convolution's inputs on."""
        h, size, n_inputs, old = (
            self.heads,
            self.heads.size,
            2 * self.heads.size + self.width,
            registers(self.per * 4, 0),
        )
        loads = [
            x for place in self.places for x in load_run(self.memory, self.before + place, 4, self.began)
        ]
        inputs, stores, moved = shared(n_inputs, 1), store_run(old, 0, loads), list[UOp]()
        for i in range(-(-n_inputs // self.threads)):
            e = self.thread + i * self.threads
            inside = None if (i + 1) * self.threads <= n_inputs else e < n_inputs
            which = (e // size).minimum(2)
            head_of = which.eq(0).where(
                self.key_head, which.eq(1).where(h.key + self.key_head, 2 * h.key + self.head)
            )
            channel = head_of * size + e % size
            if self.parts > 1:
                channel = channel + which.eq(2).where(self.first_column, 0)
            past = self.began if inside is None else self.began & inside
            window = [load(self.memory, h.input_at(self.before, k, channel), past) for k in range(h.taps - 1)]
            window.append(load(self.rows, self.first_row + channel, inside))
            weights = load_run(conv, channel * h.taps, h.taps, inside)
            stores.append(store(inputs, e, convolved(window, weights), inside))
            is_own = self._owns(which)
            for ok in (inside, self.live):
                is_own = is_own if ok is None else is_own & ok
            moved += [
                store(self.memory, h.input_at(self.after, k, channel), window[k + 1], is_own)
                for k in range(h.taps - 1)
            ]
        done = UOp.group(*stores)
        return inputs.after(done), load_run(old.after(done), 0, self.per * 4), moved

    def _owns(self, which: UOp) -> UOp:
        """Whether the block moves the inputs of its query (0), key (1) or value (2): several heads of values may share
        the first two."""
        is_first = self.head.eq(self.heads.value_head(self.key_head, UOp.const(0, INDEX)))
        return which.eq(2) | (is_first & self.part.eq(0) if self.parts > 1 else is_first)

    def totals(self, keys: Sequence[UOp], queries: Sequence[UOp], state: Sequence[UOp]) -> UOp:
        """In shared memory the products of the state with the key and with the query, by column, then those of the key
        with itself, of the query with itself, and of both. A thread has some of the keys, queries and columns."""
        stride, n_sums = 2 * self.width + 4, 2 * self.width + 3  # of a group
        partial, stores = shared(self.groups * stride, 2), []
        for which, vector in enumerate((keys, queries)):
            for c in range(4):
                product = chain(x * state[i * 4 + c] for i, x in enumerate(vector))
                place = self.group * stride + which * self.width + self.quad * 4 + c
                stores.append(store(partial, place, product))
        for i, (a, b) in enumerate(((keys, keys), (queries, queries), (keys, queries))):
            product = chain(x * y for x, y in zip(a, b, strict=True))
            stores.append(store(partial, self.group * stride + 2 * self.width + i, product, self.quad.eq(0)))
        done = partial.after(UOp.group(*stores))
        return total_of(done, self.groups, stride, n_sums, self.thread, self.threads, 3)

    def squares_total(self, y: UOp) -> UOp:
        """The sum of the squares of the results of all columns, of which a thread has one."""
        of_columns = after_store(shared(self.width, 4), self.thread, y * y, self.has_column)
        few = self.width // 8
        return tree(load_run(total_of(of_columns, 8, few, few, self.thread, self.threads, 5), 0, few))


@functools.cache
def delta_decode(
    heads: DeltaHeads, tokens: int, parts: int = 1, order: Order = "columns", out_row: int = 0
) -> Kernel:
    """A delta net without its products, for one token, or for those of `tokens` sequences. Buffers: out, for one token
    float32, permuted and scaled for the next product, else its activations, float16 in an `order`, from `out_row` on;
    with several `parts`, for one token, it is not normed, and squares are partial sums of its squares, float32 (value,
    parts); memory, float32 (memory_size,); rows, the product with the input, float32 (rows,), for each token: channels,
    gate, beta, alpha; conv, the convolution's weights, float32 (channels, taps); decay and decay_bias, float32 (value,)
    each; norm, its weight, float32 (size,); state, that of the step: int32 (2,), token and position, with room for
    several sequences (3,) with the sequence, of several tokens (4, tokens): tokens, positions, sequences, and whether
    there is a token; for one token input_scale, the result's, float32 (UNIT,)."""
    h, size = heads, heads.size
    assert parts == 1 or (not tokens and size // parts % 8 == 0)

    def kernel(
        out: UOp, squares: UOp | None, memory: UOp, rows: UOp, conv: UOp, decay: UOp, decay_bias: UOp, norm: UOp,
        state: UOp, input_scale: UOp | None,
    ) -> UOp:  # fmt: skip
        block = _DecodeBlock(h, tokens, parts, memory, rows, state)
        head, width, per, thread, has_column = (
            block.head,
            block.width,
            block.per,
            block.thread,
            block.has_column,
        )
        inputs, elements, stores = block.inputs(conv)
        queries, keys = (load_run(inputs, which * size + block.group * per, per) for which in (0, 1))
        totals = block.totals(keys, queries, elements)
        lengths = [(load(totals, 2 * width + i) + f32(h.eps)).sqrt().reciprocal() for i in (0, 1)]
        inverse_k, inverse_q, overlap = lengths[0], lengths[1] * f32(size**-0.5), load(totals, 2 * width + 2)

        first_scalar = block.first_row + h.channels + h.width + head
        beta = sigmoid(load(rows, first_scalar))
        alpha = load(rows, first_scalar + h.value)
        factor = decay_of(alpha, load(decay_bias, head), load(decay, head))

        def change(column: UOp, valid: UOp | None = None) -> UOp:
            """A column of d: what the state learns for the key."""
            known = load(totals, column, valid) * inverse_k * factor
            return beta * (load(inputs, 2 * size + column, valid) - known)

        changes = [change(block.quad * 4 + c) * inverse_k for c in range(4)]
        for i, place in enumerate(block.places):
            new = [elements[i * 4 + c] * factor + keys[i] * changes[c] for c in range(4)]
            stores += store_run(memory, block.after + place, new, block.live)

        # The result: a thread has a column.
        own_change = overlap * inverse_k * change(thread, has_column)
        y = (load(totals, width + thread, has_column) * factor + own_change) * inverse_q
        total = block.squares_total(y)
        column = block.first_column + thread
        element = head * size + block.first_column + thread
        gate = silu(load(rows, block.first_row + h.channels + element, has_column))
        result = y * load(norm, column, has_column) * gate
        if squares is None:
            result = result * inverse_rms(total, size, h.eps)
        else:
            stores.append(store(squares, block.number, total, thread.eq(0)))
        if input_scale is None:
            place = PLACES[order](out_row + block.token, element, h.width)
            stores.append(store(out, place, as_half(result), has_column))
        else:
            scaled = result * load(input_scale, element % UNIT, has_column)
            stores.append(store(out, permuted(element, h.width), scaled, has_column))
        n_bytes = 8 * h.width * size * max(tokens, 1)
        name = f"delta_{h.name}_{h.sequences}" + f"_{tokens}_{order}_{out_row}" * (tokens > 0)
        return finish(name + f"_in_{parts}" * (parts > 1), stores, n_bytes, n_bytes)

    inputs = "rows", "conv", "decay", "decay_bias", "norm", "state", not tokens and "input_scale"
    hints = NO_HINTS if tokens else of_a_token(inputs)
    return Kernel(kernel, ("out", parts > 1 and "squares", "memory"), inputs, hints)
