"""A gated delta net of one new token in decode: convolution, state, norm and gate in one kernel.

A block has a value head, or one of `parts` equal parts of the columns of its state; then the next product norms the
results (`delta_net.HeadNorm`). Each thread has the elements of some keys and four columns in
registers; they are loaded before everything else. What the keys give is added up in shared memory once, for both
products with the state: the new state is decay * S + k d, so its product with q is decay * S q + (k q) d.
"""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.recurrent.delta_net import (
    DeltaHeads,
    convolved,
    decay_of,
    silu,
)
from engine.targets.nvidia.kernels.recurrent.state_memory import sequence_of
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


@functools.cache
def delta_decode(
    heads: DeltaHeads, tokens: int, parts: int = 1, order: Order = "columns", out_row: int = 0
) -> Kernel:
    """A delta net without its products, for one token, or for those of `tokens` sequences. Buffers: out, for one token
    float32, permuted and scaled for the next product, else its activations, float16 in an
    `order`, from `out_row` on; with several `parts`, for one token, it is not normed, and squares are partial
    sums of its squares, float32 (value, parts); memory, float32 (memory_size,); rows, the product with the input,
    float32 (rows,), for each token: channels, gate, beta, alpha; conv, the convolution's weights, float32 (channels,
    taps); decay and decay_bias, float32 (value,) each; norm, its weight, float32 (size,); state, that of the step:
    int32 (2,), token and position, with room for several sequences (3,) with the sequence, of several tokens (4,
    tokens): tokens, positions, sequences, and whether there is a token; for one token input_scale, the result's,
    float32 (UNIT,)."""
    h, size, width = heads, heads.size, heads.size // parts
    per = 8 if size >= 64 else 4  # keys of a thread
    quads, groups = width // 4, size // per
    threads = quads * groups
    assert parts == 1 or (not tokens and width % 8 == 0)

    def kernel(
        out: UOp, squares: UOp | None, memory: UOp, rows: UOp, conv: UOp, decay: UOp, decay_bias: UOp, norm: UOp,
        state: UOp, input_scale: UOp | None,
    ) -> UOp:  # fmt: skip
        thread, block = UOp.special(threads, "lidx0"), UOp.special(h.value * parts * max(tokens, 1), "gidx0")
        token, head = (block // h.value, block % h.value) if tokens else (UOp.const(0, INDEX), block // parts)
        part = block % parts if parts > 1 else UOp.const(0, INDEX)
        first_column = part * width
        position = load_index(state, token + tokens if tokens else 1, MAX_POSITION)
        sequence = sequence_of(h, state, token + 2 * tokens if tokens else 2)
        live = load(state, token + 3 * tokens).ne(0) if tokens else None
        before, after = h.state_at(position, sequence), h.state_at(position + 1, sequence)
        began, first_row, key_head = position > 0, token * h.rows, h.key_head(head)

        group, quad = thread // quads, thread % quads
        places = [(head * size + group * per + i) * size + first_column + quad * 4 for i in range(per)]
        old = registers(per * 4, 0)
        loads = [x for place in places for x in load_run(memory, before + place, 4, began)]
        first_loads = store_run(old, 0, loads)

        # The convolution of the head's query, key and value, of which a part has its own columns.
        n_inputs = 2 * size + width
        inputs, stores = shared(n_inputs, 1), list(first_loads)
        moved = []
        for i in range(-(-n_inputs // threads)):
            e = thread + i * threads
            inside = None if (i + 1) * threads <= n_inputs else e < n_inputs
            which = (e // size).minimum(2)
            head_of = which.eq(0).where(key_head, which.eq(1).where(h.key + key_head, 2 * h.key + head))
            channel = head_of * size + e % size
            if parts > 1:
                channel = channel + which.eq(2).where(first_column, 0)
            past = began if inside is None else began & inside
            window = [load(memory, h.input_at(before, k, channel), past) for k in range(h.taps - 1)]
            window.append(load(rows, first_row + channel, inside))
            weights = load_run(conv, channel * h.taps, h.taps, inside)
            stores.append(store(inputs, e, convolved(window, weights), inside))
            is_first = head.eq(h.value_head(key_head, UOp.const(0, INDEX)))
            is_own = which.eq(2) | (is_first & part.eq(0) if parts > 1 else is_first)
            for ok in (inside, live):
                is_own = is_own if ok is None else is_own & ok
            moved += [
                store(memory, h.input_at(after, k, channel), window[k + 1], is_own) for k in range(h.taps - 1)
            ]
        inputs, old = inputs.after(UOp.group(*stores)), old.after(UOp.group(*stores))

        # Products of the state with the key and the query, and of these two.
        queries, keys = (load_run(inputs, which * size + group * per, per) for which in (0, 1))
        elements = load_run(old, 0, per * 4)
        stride, n_sums = 2 * width + 4, 2 * width + 3  # of a group: two products by column, three of vectors
        partial, stores = shared(groups * stride, 2), []
        for which, vector in enumerate((keys, queries)):
            for c in range(4):
                product = chain(x * elements[i * 4 + c] for i, x in enumerate(vector))
                stores.append(store(partial, group * stride + which * width + quad * 4 + c, product))
        for i, (a, b) in enumerate(((keys, keys), (queries, queries), (keys, queries))):
            product = chain(x * y for x, y in zip(a, b, strict=True))
            stores.append(store(partial, group * stride + 2 * width + i, product, quad.eq(0)))
        totals = total_of(partial.after(UOp.group(*stores)), groups, stride, n_sums, thread, threads, 3)
        lengths = [(load(totals, 2 * width + i) + f32(h.eps)).sqrt().reciprocal() for i in (0, 1)]
        inverse_k, inverse_q, overlap = lengths[0], lengths[1] * f32(size**-0.5), load(totals, 2 * width + 2)

        first_scalar = first_row + h.channels + h.width + head
        beta = sigmoid(load(rows, first_scalar))
        alpha = load(rows, first_scalar + h.value)
        factor = decay_of(alpha, load(decay_bias, head), load(decay, head))

        def change(column: UOp, valid: UOp | None = None) -> UOp:
            """A column of d: what the state learns for the key."""
            known = load(totals, column, valid) * inverse_k * factor
            return beta * (load(inputs, 2 * size + column, valid) - known)

        changes = [change(quad * 4 + c) * inverse_k for c in range(4)]
        results = []
        for i, place in enumerate(places):
            new = [elements[i * 4 + c] * factor + keys[i] * changes[c] for c in range(4)]
            results += store_run(memory, after + place, new, live)

        # The result: a thread has a column.
        has_column = None if threads == width else thread < width
        y = load(totals, width + thread, has_column) * factor + overlap * inverse_k * change(
            thread, has_column
        )
        y = y * inverse_q
        of_columns = after_store(shared(width, 4), thread, y * y, has_column)
        of_columns = total_of(of_columns, 8, width // 8, width // 8, thread, threads, 5)
        total = tree(load_run(of_columns, 0, width // 8))
        element, column = head * size + first_column + thread, first_column + thread
        gate = silu(load(rows, first_row + h.channels + element, has_column))
        result = y * load(norm, column, has_column) * gate
        if squares is None:
            result = result * inverse_rms(total, size, h.eps)
        else:
            results.append(store(squares, block, total, thread.eq(0)))
        if input_scale is None:
            results.append(
                store(out, PLACES[order](out_row + token, element, h.width), as_half(result), has_column)
            )
        else:
            scaled = result * load(input_scale, element % UNIT, has_column)
            results.append(store(out, permuted(element, h.width), scaled, has_column))
        n_bytes = 8 * h.width * size * max(tokens, 1)
        name = (
            f"delta_{h.name}_{h.sequences}"
            + f"_{tokens}_{order}_{out_row}" * (tokens > 0)
            + f"_in_{parts}" * (parts > 1)
        )
        return finish(name, [*moved, *results], n_bytes, n_bytes)

    inputs = "rows", "conv", "decay", "decay_bias", "norm", "state", not tokens and "input_scale"
    return Kernel(kernel, ("out", parts > 1 and "squares", "memory"), inputs)
