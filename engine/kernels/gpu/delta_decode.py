"""A gated delta net of one new token in decode: convolution, state, norm and gate in one kernel.

A block has a value head. Each thread has the elements of some keys and four columns of its state in registers; they are
loaded before everything else. What the keys give is added up in shared memory once, for both products with the state:
the new state is decay * S + k d, so its product with q is decay * S q + (k q) d.
"""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.delta_net import (
    MAX_POSITION,
    DeltaHeads,
    convolved,
    decay_of,
    sequence_of,
    silu,
)
from engine.kernels.gpu.few_columns import column_index
from engine.kernels.gpu.matmul import as_half
from engine.kernels.gpu.uops import (
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
from engine.kernels.gpu.weight_layout import UNIT, permuted


def total_of(parts: UOp, n: int, stride: int, count: int, thread: UOp, threads: int, slot: int) -> UOp:
    """Shared memory with `count` sums of `n` parts each, `stride` apart, that the `threads` of a block add."""
    totals, stores = shared(count, slot), []
    for first in range(0, count, threads):
        item = thread + first
        ok = None if first + threads <= count else item < count
        stores.append(store(totals, item, tree([load(parts, item + k * stride, ok) for k in range(n)]), ok))
    return totals.after(UOp.group(*stores))


@functools.cache
def delta_decode(heads: DeltaHeads, tokens: int = 0) -> Kernel:
    """A delta net without its products, for one token, or for those of `tokens` sequences. Buffers: the result, for one
    token float32, permuted and prescaled for the next product, else its activations, float16
    (`engine.kernels.gpu.few_columns`); the memory, float32 (memory_size,); the product with the input, float32 (rows,),
    for each token: channels, gate, beta, alpha; the convolution's weights, float32 (channels, taps); decay and
    decay_bias, float32 (value,) each; the norm's weight, float32 (size,); the step's state: int32 (2,), token and
    position, with room for several sequences (3,) with the sequence, of several tokens (4, tokens): tokens, positions,
    sequences, and whether there is a token; for one token the result's prescale, float32 (UNIT,)."""
    h, size = heads, heads.size
    per = 8 if size >= 64 else 4  # keys of a thread
    quads, groups = size // 4, size // per
    threads = quads * groups

    def kernel(
        out: UOp, memory: UOp, rows: UOp, conv: UOp, decays: UOp, biases: UOp, norm: UOp, state: UOp, *prescale: UOp
    ) -> UOp:  # fmt: skip
        thread, block = UOp.special(threads, "lidx0"), UOp.special(h.value * max(tokens, 1), "gidx0")
        token, head = (block // h.value, block % h.value) if tokens else (UOp.const(0, INDEX), block)
        position = load_index(state, token + tokens if tokens else 1, MAX_POSITION)
        sequence = sequence_of(h, state, token + 2 * tokens if tokens else 2)
        live = load(state, token + 3 * tokens).ne(0) if tokens else None
        before, after = h.state_at(position, sequence), h.state_at(position + 1, sequence)
        began, first_row, key_head = position > 0, token * h.rows, head % h.key

        group, quad = thread // quads, thread % quads
        places = [(head * size + group * per + i) * size + quad * 4 for i in range(per)]
        old = registers(per * 4, 0)
        loads = [x for place in places for x in load_run(memory, before + place, 4, began)]
        first_loads = store_run(old, 0, loads)

        # The convolution of the head's query, key and value.
        inputs, stores = shared(3 * size, 1), list(first_loads)
        moved = []
        for i in range(-(-3 * size // threads)):
            e = thread + i * threads
            inside = None if (i + 1) * threads <= 3 * size else e < 3 * size
            which = (e // size).minimum(2)
            head_of = which.eq(0).where(key_head, which.eq(1).where(h.key + key_head, 2 * h.key + head))
            channel = head_of * size + e % size
            past = began if inside is None else began & inside
            window = [load(memory, h.conv_at(before, k, channel), past) for k in range(h.taps - 1)]
            window.append(load(rows, first_row + channel, inside))
            weights = load_run(conv, channel * h.taps, h.taps, inside)
            stores.append(store(inputs, e, convolved(window, weights), inside))
            is_own = which.eq(2) | (head < h.key)
            for ok in (inside, live):
                is_own = is_own if ok is None else is_own & ok
            moved += [
                store(memory, h.conv_at(after, k, channel), window[k + 1], is_own) for k in range(h.taps - 1)
            ]
        inputs, old = inputs.after(UOp.group(*stores)), old.after(UOp.group(*stores))

        # Products of the state with the key and the query, and of these two.
        queries, keys = (load_run(inputs, which * size + group * per, per) for which in (0, 1))
        elements = load_run(old, 0, per * 4)
        stride, n_sums = (
            2 * size + 4,
            2 * size + 3,
        )  # of a group: two products by column, and three of vectors
        partial, stores = shared(groups * stride, 2), []
        for which, vector in enumerate((keys, queries)):
            for c in range(4):
                product = chain(x * elements[i * 4 + c] for i, x in enumerate(vector))
                stores.append(store(partial, group * stride + which * size + quad * 4 + c, product))
        for i, (a, b) in enumerate(((keys, keys), (queries, queries), (keys, queries))):
            product = chain(x * y for x, y in zip(a, b, strict=True))
            stores.append(store(partial, group * stride + 2 * size + i, product, quad.eq(0)))
        totals = total_of(partial.after(UOp.group(*stores)), groups, stride, n_sums, thread, threads, 3)
        lengths = [(load(totals, 2 * size + i) + f32(h.eps)).sqrt().reciprocal() for i in (0, 1)]
        inverse_k, inverse_q, overlap = lengths[0], lengths[1] * f32(size**-0.5), load(totals, 2 * size + 2)

        first_scalar = first_row + h.channels + h.width + head
        beta = sigmoid(load(rows, first_scalar))
        alpha = load(rows, first_scalar + h.value)
        decay = decay_of(alpha, load(biases, head), load(decays, head))

        def change(column: UOp, valid: UOp | None = None) -> UOp:
            """A column of d: what the state learns for the key."""
            known = load(totals, column, valid) * inverse_k * decay
            return beta * (load(inputs, 2 * size + column, valid) - known)

        changes = [change(quad * 4 + c) * inverse_k for c in range(4)]
        results = []
        for i, place in enumerate(places):
            new = [elements[i * 4 + c] * decay + keys[i] * changes[c] for c in range(4)]
            results += store_run(memory, after + place, new, live)

        # The result: a thread has a column.
        has_column = None if threads == size else thread < size
        y = load(totals, size + thread, has_column) * decay + overlap * inverse_k * change(thread, has_column)
        y = y * inverse_q
        squares = after_store(shared(size, 4), thread, y * y, has_column)
        squares = total_of(squares, 8, size // 8, size // 8, thread, threads, 5)
        factor = inverse_rms(tree(load_run(squares, 0, size // 8)), size, h.eps)
        element = head * size + thread
        gate = silu(load(rows, first_row + h.channels + element, has_column))
        result = y * factor * load(norm, thread, has_column) * gate
        if tokens:
            results.append(store(out, column_index(token, element, h.width), as_half(result), has_column))
        else:
            scaled = result * load(prescale[0], element % UNIT, has_column)
            results.append(store(out, permuted(element, h.width), scaled, has_column))
        n_bytes = 8 * h.width * size * max(tokens, 1)
        name = f"delta_{h.name}_{h.sequences}" + f"_{tokens}" * (tokens > 0)
        return finish(name, [*moved, *results], n_bytes, n_bytes)

    return kernel
