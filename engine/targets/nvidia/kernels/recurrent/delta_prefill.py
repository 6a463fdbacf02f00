"""A gated delta net of pieces of prompts:

    delta_inputs (convolution, norms, what follows from the inputs alone) . delta_scan (the state) . gated_norm

The state goes over the tokens in order, `GROUP` at a time. Let S be the state before a group, g_t the decays, G_t their
product up to t, and G_t/s that of those after s up to t. Then, with d_t = beta_t (v_t - g_t S_t-1 k_t):

    d_t = beta_t (v_t - G_t S k_t - sum over s < t of G_t/s (k_s k_t) d_s)
    y_t = G_t S q_t + sum over s <= t of G_t/s (k_s q_t) d_s
    S'  = G_n S + sum over s of G_n/s k_s d_s

So all products with S of a group are taken at once, and the numbers in front of d, v and S follow from the inputs
alone: `delta_inputs` computes them for all groups in parallel. A token after the prompt's end has g = 1 and beta = 0,
and so it leaves the state as it is.

In a check of guesses, groups have one token, and each leaves its state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION, PIECE_ROWS, Piece
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.recurrent.delta_decode import total_of
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
    all_of,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_run,
    registers,
    shared,
    sigmoid,
    store,
    store_run,
    tree,
)

GROUP = 4
_SEGMENTS = 4  # of a sum over a head


def _coefficients(group: int) -> int:
    """The coefficients of a group of so many tokens and a value head, with padding to align the next."""
    return -(-(4 * group + group * group) // 4) * 4


def vectors_size(heads: DeltaHeads, tokens: int) -> int:
    """Elements of the normed keys and queries, float32 [group, key head, key or query, token of the group, size]."""
    return tokens * heads.key * 2 * heads.size


def coefficients_size(heads: DeltaHeads, tokens: int, n: int = GROUP) -> int:
    """Elements of the numbers in front of d, v and S, float32 [group, value head, `_coefficients`], of groups of `n`
    tokens: for each token beta G, beta, G, and G_n/t; the factors of d_s in d_t, s < t; the factors of d_s in y_t,
    s <= t."""
    return tokens // n * heads.value * _coefficients(n)


@functools.cache
def delta_inputs(heads: DeltaHeads, runs: Runs, n: int = GROUP) -> Kernel:
    """The convolution of a chunk's queries and keys, and all that depends on the inputs alone, in groups of `n` tokens.
    `runs`: those of the product with the input, of `DeltaHeads.rows` rows, that have channels, beta or alpha. Buffers:
    vectors, keys and queries (`vectors_size`); coefficients (`coefficients_size`); memory; sums, those of each run;
    prompt, the step's state (`pieces`); conv, the convolution's weights, float32 (channels, taps); decay and
    decay_bias, float32 (value,) each."""
    h, size, shared_by, n_coefficients = heads, heads.size, heads.value // heads.key, _coefficients(n)
    tokens = runs.tokens
    pairs = [(0, 0, t, t) for t in range(n)] + [(1, 1, t, t) for t in range(n)]
    pairs += [(0, 0, s, t) for t in range(n) for s in range(t)]
    pairs += [(0, 1, s, t) for t in range(n) for s in range(t + 1)]
    number = {pair: i for i, pair in enumerate(pairs)}
    stride = size // _SEGMENTS + 4  # neighbouring segments begin in different banks

    def kernel(
        vectors: UOp, coefficients: UOp, memory: UOp, sums: Sequence[UOp], prompt: UOp, conv: UOp, decay: UOp,
        decay_bias: UOp,
    ) -> UOp:  # fmt: skip
        e, group, key_head = (
            UOp.special(size, "lidx0"),
            UOp.special(tokens // n, "gidx0"),
            UOp.special(h.key, "gidx1"),
        )
        piece = Piece.of(prompt, group * n, tokens, MAX_POSITION)
        before = h.state_at(piece.position, sequence_of(h, prompt, piece.sequence_at))
        first = piece.token(group * n)
        live = [first + t < piece.count for t in range(n)]

        def inputs(head: UOp) -> list[UOp]:
            """The tokens' inputs of this thread's element of a head, after the convolution."""
            channel, tokens_of = head * size + e, [first + i for i in range(1 - h.taps, n)]
            at = runs, sums, memory, piece, before, channel
            window = [h.input_of(*at, token, token < piece.count) for token in tokens_of]
            weights = load_run(conv, channel * h.taps, h.taps)
            return [convolved(window[t : t + h.taps], weights) for t in range(n)]

        queries, keys = inputs(key_head), inputs(h.key + key_head)
        stores: list[UOp] = []

        # All products of two vectors of the group: first of segments, then of heads.
        products, dots, both = (
            shared(len(pairs) * _SEGMENTS * stride, 0),
            shared(len(pairs) * _SEGMENTS, 1),
            (keys, queries),
        )
        segment = size // _SEGMENTS
        place = e // segment * stride + e % segment
        products = products.after(UOp.group(*(
            store(products, i * (_SEGMENTS * stride) + place, both[a][s] * both[b][t])
            for i, (a, b, s, t) in enumerate(pairs)
        )))  # fmt: skip
        sums_of_segments, n_items = [], len(pairs) * _SEGMENTS
        for start in range(0, n_items, size):
            item = e + start
            ok = None if start + size <= n_items else item < n_items
            total = chain(load(products, item * stride + i, ok) for i in range(segment))
            sums_of_segments.append(store(dots, item, total, ok))
        dots = dots.after(UOp.group(*sums_of_segments))

        def dot(a: int, b: int, s: int, t: int) -> UOp:
            return tree(load_run(dots, number[a, b, s, t] * _SEGMENTS, _SEGMENTS))

        factors = [[(dot(a, a, t, t) + f32(h.eps)).sqrt().reciprocal() for t in range(n)] for a in (0, 1)]
        factors[1] = [x * f32(size**-0.5) for x in factors[1]]
        for which, vector in enumerate(both):
            for t in range(n):
                place = (((group * h.key + key_head) * 2 + which) * n + t) * size + e
                stores.append(store(vectors, place, vector[t] * factors[which][t]))

        # A thread for each value head.
        head, is_head = h.value_head(key_head, e.minimum(shared_by - 1)), e < shared_by
        scalar = h.channels + h.width + head
        betas, decays = [], []
        for t in range(n):
            beta, alpha = (
                runs.load(sums, None, group * n + t, scalar + k * h.value, live[t] & is_head) for k in (0, 1)
            )
            betas.append(live[t].where(sigmoid(beta), f32(0)))
            of_token = decay_of(alpha, load(decay_bias, head), load(decay, head))
            decays.append(live[t].where(of_token, f32(1)))

        def decay_after(s: int, t: int) -> UOp:
            """G_t/s; that of all tokens up to t if s is -1."""
            return tree(decays[s + 1 : t + 1], lambda a, b: a * b) if t > s else f32(1)

        own = []
        for t in range(n):
            whole = decay_after(-1, t)
            own += [betas[t] * whole, betas[t], whole, decay_after(t, n - 1)]
        for t in range(n):
            for s in range(t):
                product = dot(0, 0, s, t) * factors[0][s] * factors[0][t]
                own.append(betas[t] * decay_after(s, t) * product)
        for t in range(n):
            for s in range(t + 1):
                own.append(decay_after(s, t) * dot(0, 1, s, t) * factors[0][s] * factors[1][t])
        own += [f32(0)] * (n_coefficients - len(own))
        stores += store_run(coefficients, (group * h.value + head) * n_coefficients, own, is_head)
        return finish(f"delta_inputs_{h.name}_{h.sequences}_{tokens}_{n}", stores)

    inputs = "memory", ("sums", len(runs.sizes)), "prompt", "conv", "decay", "decay_bias"
    return Kernel(kernel, ("vectors", "coefficients"), inputs)


def _learned(
    numbers: Sequence[UOp], values: Sequence[UOp], with_keys: Sequence[UOp], with_queries: Sequence[UOp]
) -> list[tuple[UOp, UOp]]:
    """d and y of each token of a group, as above, in a column: from its coefficients, the values, and the products of
    the state with the keys and the queries."""
    n, changes, results = len(values), list[UOp](), list[UOp]()
    of_changes, of_results = numbers[4 * n :][: n * (n - 1) // 2], numbers[4 * n + n * (n - 1) // 2 :]
    for t in range(n):
        beta_decay, beta, decay, _ = numbers[4 * t : 4 * t + 4]
        known = [x * c * f32(-1) for x, c in zip(changes, of_changes[t * (t - 1) // 2 :], strict=False)]
        changes.append(chain([values[t] * beta, with_keys[t] * beta_decay * f32(-1), *known]))
        terms = [x * c for x, c in zip(changes, of_results[t * (t + 1) // 2 :], strict=False)]
        results.append(chain([with_queries[t] * decay, *terms]))
    return [*zip(changes, results, strict=True)]


@functools.cache
def delta_scan(heads: DeltaHeads, runs: Runs, several: bool, checks: bool = False) -> Kernel:
    """The state over the piece that begins at the first row, or over `several`. If it `checks`, groups have one token,
    and each leaves a state. `runs`: those of the product with channels. Buffers: products, those with the state,
    float32 (tokens, width); memory; what `delta_inputs` makes: vectors and coefficients; sums, prompt and conv, as
    there.

    A block has some columns of a head's state, and makes their values. Each of its threads has some keys of four
    columns; their products with the group's keys and queries meet in shared memory. A thread for each column finds
    what the state learns. Then each changes its part. The next group is loaded meanwhile."""
    h, size, n = heads, heads.size, 1 if checks else GROUP
    assert not checks or h.slots > runs.tokens
    n_coefficients = _coefficients(n)
    width, own = min(32, size), 8 if size >= 64 else 4  # columns of a block, keys of a thread
    quads, parts_of_head, tokens = width // 4, size // width, runs.tokens
    threads, units = quads * (size // own), -(-tokens // PIECE_ROWS) if several else 1
    spans = 2 * n * size, n * width, n_coefficients  # of a group in shared memory
    firsts, span = (0, spans[0], spans[0] + spans[1]), sum(spans)

    def kernel(
        products: UOp,
        memory: UOp,
        vectors: UOp,
        coefficients: UOp,
        sums: Sequence[UOp],
        prompt: UOp,
        conv: UOp,
    ) -> UOp:
        thread = UOp.special(threads, "lidx0")
        quad, first_key = thread % quads, thread // quads * own
        block = UOp.special(h.value * parts_of_head, "gidx0")
        head, part = block // parts_of_head, block % parts_of_head
        key_head, column = h.key_head(head), part * width + thread % width
        row = UOp.special(units, "gidx1") * PIECE_ROWS if units > 1 else UOp.const(0)
        piece = Piece.of(prompt, row, tokens, MAX_POSITION)
        if several:  # a piece that begins before is other blocks'
            piece = replace(piece, count=piece.first.eq(row).where(piece.count, 0))
        else:
            piece = replace(piece, first=UOp.const(0))
        position, count, first_group = piece.position, piece.count, piece.first // n
        sequence, began = sequence_of(h, prompt, piece.sequence_at), position > 0
        before, after = h.state_at(position, sequence), h.state_at(position + count, sequence)
        places = [(head * size + first_key + i) * size + part * width + quad * 4 for i in range(own)]
        state = registers(own * 4, 0)
        start = store_run(state, 0, [x for at in places for x in load_run(memory, before + at, 4, began)])

        def value_of(group: UOp, item: UOp, ok: UOp | None) -> UOp:
            """A value of a group after the convolution: `item` counts columns, then tokens."""
            token, channel = (
                group * n + item // width,
                (2 * h.key + head) * size + part * width + item % width,
            )
            at, window = (runs, sums, memory, piece, before, channel), []
            for k in range(1 - h.taps, 1):
                valid = token + k < count if ok is None else (token + k < count) & ok
                window.append(h.input_of(*at, token + k, valid))
            return convolved(window, load_run(conv, channel * h.taps, h.taps, ok))

        def group_loads(group: UOp) -> list[tuple[UOp, UOp, UOp | None]]:
            """This thread's part of a group: (place in shared memory, value, whether there is one)."""
            loads: list[tuple[UOp, UOp, UOp | None]] = []
            number = (first_group + group).minimum(tokens // n - 1)
            firsts_of = (
                (number * h.key + key_head) * spans[0],
                None,
                (number * h.value + head) * n_coefficients,
            )
            for first, buffer, from_, n_items in zip(
                firsts, (vectors, None, coefficients), firsts_of, spans, strict=True
            ):
                run = 4 if n_items >= threads * 4 and buffer is not None else 1
                for i in range(0, n_items, threads * run):
                    item = i + thread * run
                    ok = None if i + threads * run <= n_items else item < n_items
                    if buffer is None or from_ is None:
                        loads.append((first + item, value_of(group, item, ok), ok))
                        continue
                    loads += [(first + item + k, load(buffer, from_ + item + k, ok), ok) for k in range(run)]
            return loads

        def put(array: UOp, half: UOp, loads: Sequence[tuple[UOp, UOp, UOp | None]]) -> UOp:
            return UOp.group(*(store(array, half * span + place, value, ok) for place, value, ok in loads))

        array = shared(2 * span, 1)
        ready = UOp.group(put(array, UOp.const(0), group_loads(UOp.const(0))), *start)
        array, state = array.after(ready), state.after(ready)

        group = UOp.range((count + (n - 1)) // n, 0, AxisType.LOOP)
        following = group_loads(group + 1)
        held, so_far, first = array.after(group), load_run(state.after(group), 0, own * 4), group % 2 * span
        keys, queries = (
            [load_run(held, first + (which * n + t) * size + first_key, own) for t in range(n)]
            for which in (0, 1)
        )
        n_sums = 2 * n * width
        partial, stores = shared(size // own * n_sums, 2), []
        for i, vector in enumerate((*keys, *queries)):
            parts = (chain(x * so_far[k * 4 + c] for k, x in enumerate(vector)) for c in range(4))
            stores += store_run(partial, thread // quads * n_sums + i * width + quad * 4, parts)
        totals = total_of(partial.after(UOp.group(*stores)), size // own, n_sums, n_sums, thread, threads, 3)

        # What the state learns, by a thread for each column.
        is_column = None if threads == width else thread < width
        numbers = load_run(held, first + firsts[2], n_coefficients, is_column)
        values, with_keys, with_queries = (
            [load(of, at + t * width + thread % width, is_column) for t in range(n)]
            for of, at in ((held, first + firsts[1]), (totals, UOp.const(0)), (totals, UOp.const(n * width)))
        )
        learned, stores = shared(n * width, 4), []
        for t, (change, y) in enumerate(_learned(numbers, values, with_keys, with_queries)):
            token = piece.first + group * n + t
            stores.append(store(products, token * h.width + head * size + column, y, is_column))
            stores.append(store(learned, t * width + thread % width, change * numbers[4 * t + 3], is_column))
        learned = learned.after(UOp.group(*stores))
        lasting = [load_run(learned, t * width + quad * 4, 4) for t in range(n)]
        decay = load(held, first + firsts[2] + (4 * (n - 1) + 2))
        new = [
            chain([x * decay, *(keys[t][i // 4] * lasting[t][i % 4] for t in range(n))])
            for i, x in enumerate(so_far)
        ]
        stores = [*store_run(state, 0, new), put(array, (group + 1) % 2, following)]
        if checks:
            of_token = h.state_at(position + group + 1, sequence)
            for i, place in enumerate(places):
                stores += store_run(memory, of_token + place, new[4 * i : 4 * i + 4])
        done, results = UOp.group(*stores).end(group), list[UOp]()
        has_tokens = count > 0 if several else None
        final = load_run(state.after(done), 0, own * 4)
        for i, place in enumerate(() if checks else places):
            results += store_run(memory, after + place, final[4 * i : 4 * i + 4], has_tokens)

        # The last inputs of the convolution. Values, which are read here, are written by the block that has read them.
        ends: list[tuple[UOp, UOp, UOp | None]] = [(count, after, has_tokens)]
        if checks:
            of_tokens = [h.state_at(position + t + 1, sequence) for t in range(tokens)]
            ends = [(UOp.const(t + 1, INDEX), at, t < count) for t, at in enumerate(of_tokens)]

        def keep(channel: UOp, slot: int, ok: UOp | None) -> list[UOp]:
            at, stores = (runs, sums, memory, piece, before, channel), list[UOp]()
            for t, (end, state, is_end) in enumerate(ends):
                stores += h.keep(*at, end, state, all_of(ok, is_end), slot + 100 * t, [done])
            return stores

        results += keep((2 * h.key + head) * size + column, 10, is_column)
        n_others, n_threads = 2 * h.key * size, threads * h.value * parts_of_head
        for i in range(0, n_others, n_threads):
            channel = block * threads + thread + i
            inside = channel < n_others
            results += keep(channel.minimum(n_others - 1), 11 + i, inside)
        n_ops = tokens * h.width * size * 6
        name = f"delta_scan_{h.name}_{h.sequences}_{tokens}" + "_several" * several + "_checks" * checks
        return finish(name, results, 8 * h.width * size, n_ops)

    inputs = "vectors", "coefficients", ("sums", len(runs.sizes)), "prompt", "conv"
    return Kernel(kernel, ("products", "memory"), inputs)


@functools.cache
def gated_norm(heads: DeltaHeads, runs: Runs, order: Order = "fragments") -> Kernel:
    """norm(y) * silu(gate) of a chunk, for the last product. `runs`: those of the product with the gate. Buffers: out,
    float16 in an `Order`; products, those of `delta_scan`; norm, its weight, float32 (size,); sums, those of each
    run."""
    h, size, tokens, lanes = heads, heads.size, runs.tokens, heads.size // 4
    abreast = next(n for n in range(max(1, 256 // lanes), 0, -1) if h.value % n == 0)  # heads of a block

    def kernel(out: UOp, products: UOp, norm: UOp, sums: Sequence[UOp]) -> UOp:
        lane, own = UOp.special(lanes, "lidx0"), UOp.special(abreast, "lidx1")
        token, block = UOp.special(tokens, "gidx0"), UOp.special(h.value // abreast, "gidx1")
        first = (block * abreast + own) * size + lane * 4
        y = load_run(products, token * h.width + first, 4)
        squares = after_store(shared(lanes * abreast, 0), own * lanes + lane, chain(x * x for x in y))
        factor = inverse_rms(tree(load_run(squares, own * lanes, lanes)), size, h.eps)
        stores = []
        for i, x in enumerate(y):
            gate = silu(runs.load(sums, None, token, h.channels + first + i, UOp.const(True)))
            result = as_half(x * factor * load(norm, lane * 4 + i) * gate)
            stores.append(store(out, PLACES[order](token, first + i, h.width), result))
        return finish(f"delta_norm_{h.name}_{tokens}", stores)

    return Kernel(kernel, ("out",), ("products", "norm", ("sums", len(runs.sizes))))
