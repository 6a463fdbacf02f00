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
from engine.targets.nvidia.kernels.recurrent.delta_net import DeltaHeads, convolved, decay_of, silu
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


class _Dots:
    """The products of two vectors of a group, with a thread for each of their elements: of keys (0) with keys, of
    queries (1) with queries, of keys with queries of the same or a later token."""

    def __init__(self, vectors: Sequence[Sequence[UOp]], size: int, e: UOp) -> None:
        """`vectors`: element `e` of the keys and of the queries of each token."""
        n, segment = len(vectors[0]), size // _SEGMENTS
        pairs = [(0, 0, t, t) for t in range(n)] + [(1, 1, t, t) for t in range(n)]
        pairs += [(0, 0, s, t) for t in range(n) for s in range(t)]
        pairs += [(0, 1, s, t) for t in range(n) for s in range(t + 1)]
        self._number = {pair: i for i, pair in enumerate(pairs)}
        stride = segment + 4  # neighbouring segments begin in different banks
        n_items, place = len(pairs) * _SEGMENTS, e // segment * stride + e % segment
        products, dots = shared(n_items * stride, 0), shared(n_items, 1)
        products = products.after(UOp.group(*(
            store(products, i * (_SEGMENTS * stride) + place, vectors[a][s] * vectors[b][t])
            for i, (a, b, s, t) in enumerate(pairs)
        )))  # fmt: skip
        stores = []
        for start in range(0, n_items, size):
            item = e + start
            ok = None if start + size <= n_items else item < n_items
            total = chain(load(products, item * stride + i, ok) for i in range(segment))
            stores.append(store(dots, item, total, ok))
        self._dots = dots.after(UOp.group(*stores))

    def of(self, a: int, b: int, s: int, t: int) -> UOp:
        """The product of vector `a` of token s and vector `b` of token t."""
        return tree(load_run(self._dots, self._number[a, b, s, t] * _SEGMENTS, _SEGMENTS))


def _numbers(
    dots: _Dots, factors: Sequence[Sequence[UOp]], betas: Sequence[UOp], decays: Sequence[UOp]
) -> list[UOp]:
    """The numbers in front of d, v and S of a group, as `coefficients_size` has them. `factors`: those of the norms of
    keys and of queries."""
    n, numbers = len(betas), list[UOp]()

    def decay_after(s: int, t: int) -> UOp:
        """G_t/s; that of all tokens up to t if s is -1."""
        return tree(decays[s + 1 : t + 1], lambda a, b: a * b) if t > s else f32(1)

    for t in range(n):
        whole = decay_after(-1, t)
        numbers += [betas[t] * whole, betas[t], whole, decay_after(t, n - 1)]
    for t in range(n):
        for s in range(t):
            product = dots.of(0, 0, s, t) * factors[0][s] * factors[0][t]
            numbers.append(betas[t] * decay_after(s, t) * product)
    for t in range(n):
        for s in range(t + 1):
            numbers.append(decay_after(s, t) * dots.of(0, 1, s, t) * factors[0][s] * factors[1][t])
    return numbers + [f32(0)] * (_coefficients(n) - len(numbers))


@functools.cache
def delta_inputs(heads: DeltaHeads, runs: Runs, n: int = GROUP) -> Kernel:
    """The convolution of a chunk's queries and keys, and all that depends on the inputs alone, in groups of `n` tokens.
    `runs`: those of the product with the input, of `DeltaHeads.rows` rows, that have channels, beta or alpha. Buffers:
    vectors, keys and queries (`vectors_size`); coefficients (`coefficients_size`); memory; sums, those of each run;
    prompt, the step's state (`pieces`); conv, the convolution's weights, float32 (channels, taps); decay and
    decay_bias, float32 (value,) each."""
    h, size, shared_by, tokens = heads, heads.size, heads.value // heads.key, runs.tokens

    def kernel(
        vectors: UOp, coefficients: UOp, memory: UOp, sums: Sequence[UOp], prompt: UOp, conv: UOp, decay: UOp,
        decay_bias: UOp,
    ) -> UOp:  # fmt: skip
        e, group = UOp.special(size, "lidx0"), UOp.special(tokens // n, "gidx0")
        key_head = UOp.special(h.key, "gidx1")
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

        both = inputs(h.key + key_head), inputs(key_head)
        dots, stores = _Dots(both, size, e), list[UOp]()
        factors = [[(dots.of(a, a, t, t) + f32(h.eps)).sqrt().reciprocal() for t in range(n)] for a in (0, 1)]
        factors[1] = [x * f32(size**-0.5) for x in factors[1]]
        for which, vector in enumerate(both):
            for t in range(n):
                place = (((group * h.key + key_head) * 2 + which) * n + t) * size + e
                stores.append(store(vectors, place, vector[t] * factors[which][t]))

        # A thread for each value head.
        head, is_head = h.value_head(key_head, e.minimum(shared_by - 1)), e < shared_by
        scalar, betas, decays = h.channels + h.width + head, list[UOp](), list[UOp]()
        for t in range(n):
            beta, alpha = (
                runs.load(sums, None, group * n + t, scalar + k * h.value, live[t] & is_head) for k in (0, 1)
            )
            betas.append(live[t].where(sigmoid(beta), f32(0)))
            of_token = decay_of(alpha, load(decay_bias, head), load(decay, head))
            decays.append(live[t].where(of_token, f32(1)))
        place = (group * h.value + head) * _coefficients(n)
        stores += store_run(coefficients, place, _numbers(dots, factors, betas, decays), is_head)
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


class _ScanBlock:
    """A block of `delta_scan`: `width` columns of the state of a head, from `first_column` on. A thread has four
    columns of `own` keys in registers, from `first_key` on. Shared memory has two groups, each as `spans`: keys and
    queries, values, coefficients."""

    def __init__(
        self, heads: DeltaHeads, runs: Runs, several: bool, checks: bool, memory: UOp, vectors: UOp,
        coefficients: UOp, sums: Sequence[UOp], prompt: UOp, conv: UOp,
    ) -> None:  # fmt: skip
        h, size, n = heads, heads.size, 1 if checks else GROUP
        self.heads, self.runs, self.n, self.checks = heads, runs, n, checks
        self.memory, self.vectors, self.coefficients = memory, vectors, coefficients
        self.sums, self.conv = sums, conv
        self.width, self.own = min(32, size), 8 if size >= 64 else 4
        self.quads, parts = self.width // 4, size // self.width
        self.threads, self.blocks = self.quads * (size // self.own), h.value * parts
        self.spans = 2 * n * size, n * self.width, _coefficients(n)
        self.firsts, self.span = (0, self.spans[0], self.spans[0] + self.spans[1]), sum(self.spans)
        self.thread, self.block = UOp.special(self.threads, "lidx0"), UOp.special(self.blocks, "gidx0")
        self.quad, self.first_key = self.thread % self.quads, self.thread // self.quads * self.own
        self.head, part = self.block // parts, self.block % parts
        self.key_head, self.first_column = h.key_head(self.head), part * self.width
        self.column = self.first_column + self.thread % self.width
        self.is_column = None if self.threads == self.width else self.thread < self.width
        units = -(-runs.tokens // PIECE_ROWS) if several else 1
        row = UOp.special(units, "gidx1") * PIECE_ROWS if units > 1 else UOp.const(0)
        piece = Piece.of(prompt, row, runs.tokens, MAX_POSITION)
        if several:  # a piece that begins before is other blocks'
            self.piece = replace(piece, count=piece.first.eq(row).where(piece.count, 0))
        else:
            self.piece = replace(piece, first=UOp.const(0))
        self.has_tokens = self.piece.count > 0 if several else None
        self.sequence = sequence_of(h, prompt, piece.sequence_at)
        self.before = h.state_at(self.piece.position, self.sequence)
        self.places = [
            (self.head * size + self.first_key + i) * size + self.first_column + self.quad * 4
            for i in range(self.own)
        ]

    def state_after(self, tokens: UOp | int) -> UOp:
        """Where the state after so many tokens of the piece is."""
        return self.heads.state_at(self.piece.position + tokens, self.sequence)

    def _value_of(self, group: UOp, item: UOp, ok: UOp | None) -> UOp:
        """A value of a group after the convolution: `item` counts columns, then tokens."""
        h, token = self.heads, group * self.n + item // self.width
        channel = (2 * h.key + self.head) * h.size + self.first_column + item % self.width
        window = []
        for k in range(1 - h.taps, 1):
            valid = token + k < self.piece.count
            valid = valid if ok is None else valid & ok
            window.append(h.input_of(*self._channel(channel), token + k, valid))
        return convolved(window, load_run(self.conv, channel * h.taps, h.taps, ok))

    def _channel(self, channel: UOp) -> tuple[Runs, Sequence[UOp], UOp, Piece, UOp, UOp]:
        """What `ConvolvedMemory.input_of` and `keep` take of a channel."""
        return self.runs, self.sums, self.memory, self.piece, self.before, channel

    def _loads(self, group: UOp) -> list[tuple[UOp, UOp, UOp | None]]:
        """This thread's part of a group: (place in shared memory, value, whether there is one)."""
        loads: list[tuple[UOp, UOp, UOp | None]] = []
        number = (self.piece.first // self.n + group).minimum(self.runs.tokens // self.n - 1)
        of_keys, of_head = number * self.heads.key + self.key_head, number * self.heads.value + self.head
        buffers = (self.vectors, of_keys * self.spans[0]), None, (self.coefficients, of_head * self.spans[2])
        for first, buffer, n_items in zip(self.firsts, buffers, self.spans, strict=True):
            run = 4 if n_items >= self.threads * 4 and buffer is not None else 1
            for i in range(0, n_items, self.threads * run):
                item = i + self.thread * run
                ok = None if i + self.threads * run <= n_items else item < n_items
                if buffer is None:
                    loads.append((first + item, self._value_of(group, item, ok), ok))
                    continue
                source, start = buffer
                loads += [(first + item + k, load(source, start + item + k, ok), ok) for k in range(run)]
        return loads

    def _put(self, array: UOp, half: UOp, loads: Sequence[tuple[UOp, UOp, UOp | None]]) -> UOp:
        """Stores what was loaded of a group."""
        return UOp.group(*(store(array, half * self.span + place, value, ok) for place, value, ok in loads))

    def scanned(self, products: UOp) -> tuple[UOp, list[UOp]]:
        """All groups, one after the other: their effects, and after them this thread's part of the state."""
        n, own = self.n, self.own
        array, state = shared(2 * self.span, 1), registers(own * 4, 0)
        began = self.piece.position > 0
        old = [x for place in self.places for x in load_run(self.memory, self.before + place, 4, began)]
        first_loads = self._put(array, UOp.const(0), self._loads(UOp.const(0)))
        ready = UOp.group(first_loads, *store_run(state, 0, old))
        array, state = array.after(ready), state.after(ready)

        group = UOp.range((self.piece.count + (n - 1)) // n, 0, AxisType.LOOP)
        following = self._loads(group + 1)
        held, so_far, first = (
            array.after(group),
            load_run(state.after(group), 0, own * 4),
            group % 2 * self.span,
        )
        keys, queries = (
            [
                load_run(held, first + (which * n + t) * self.heads.size + self.first_key, own)
                for t in range(n)
            ]
            for which in (0, 1)
        )
        totals = self._products([*keys, *queries], so_far)
        learned = self._learned(products, group, held, first, totals)
        lasting = [load_run(learned, t * self.width + self.quad * 4, 4) for t in range(n)]
        decay = load(held, first + self.firsts[2] + (4 * (n - 1) + 2))
        new = [
            chain([x * decay, *(keys[t][i // 4] * lasting[t][i % 4] for t in range(n))])
            for i, x in enumerate(so_far)
        ]
        stores = [*store_run(state, 0, new), self._put(array, (group + 1) % 2, following)]
        if self.checks:
            of_token = self.state_after(group + 1)
            for i, place in enumerate(self.places):
                stores += store_run(self.memory, of_token + place, new[4 * i : 4 * i + 4])
        done = UOp.group(*stores).end(group)
        return done, load_run(state.after(done), 0, own * 4)

    def _products(self, vectors: Sequence[Sequence[UOp]], state: Sequence[UOp]) -> UOp:
        """The products of the state with a group's keys and queries, of which a thread has some elements: shared memory
        (vector, column)."""
        n_sums, n_keys = len(vectors) * self.width, self.heads.size // self.own
        partial, stores = shared(n_keys * n_sums, 2), list[UOp]()
        for i, vector in enumerate(vectors):
            parts = (chain(x * state[k * 4 + c] for k, x in enumerate(vector)) for c in range(4))
            first = self.thread // self.quads * n_sums + i * self.width + self.quad * 4
            stores += store_run(partial, first, parts)
        return total_of(
            partial.after(UOp.group(*stores)), n_keys, n_sums, n_sums, self.thread, self.threads, 3
        )

    def _learned(self, products: UOp, group: UOp, held: UOp, first: UOp, totals: UOp) -> UOp:
        """What the state learns of a group, as much as is left of it at its end: shared memory (token, column). A
        thread for each column finds it, and stores the results. `held`: shared memory with the group, from `first`
        on."""
        h, n, width, column, ok = self.heads, self.n, self.width, self.thread % self.width, self.is_column
        numbers = load_run(held, first + self.firsts[2], self.spans[2], ok)
        values, with_keys, with_queries = (
            [load(of, at + t * width + column, ok) for t in range(n)]
            for of, at in (
                (held, first + self.firsts[1]),
                (totals, UOp.const(0)),
                (totals, UOp.const(n * width)),
            )
        )
        learned, stores = shared(n * width, 4), []
        for t, (change, y) in enumerate(_learned(numbers, values, with_keys, with_queries)):
            token = self.piece.first + group * n + t
            stores.append(store(products, token * h.width + self.head * h.size + self.column, y, ok))
            stores.append(store(learned, t * width + column, change * numbers[4 * t + 3], ok))
        return learned.after(UOp.group(*stores))

    def kept(self, state: Sequence[UOp], done: UOp) -> list[UOp]:
        """The stores of the state at the end, unless each token has left one, and of the last inputs of the
        convolution. Values, which are read here, are written by the block that has read them."""
        h, results = self.heads, list[UOp]()
        after = self.state_after(self.piece.count)
        for i, place in enumerate(() if self.checks else self.places):
            results += store_run(self.memory, after + place, state[4 * i : 4 * i + 4], self.has_tokens)
        results += self._inputs_kept((2 * h.key + self.head) * h.size + self.column, 10, self.is_column, done)
        n_others, n_threads = 2 * h.key * h.size, self.threads * self.blocks
        for i in range(0, n_others, n_threads):
            channel = self.block * self.threads + self.thread + i
            results += self._inputs_kept(channel.minimum(n_others - 1), 11 + i, channel < n_others, done)
        return results

    def _inputs_kept(self, channel: UOp, slot: int, ok: UOp | None, done: UOp) -> list[UOp]:
        """The stores of a channel's inputs, to the state after the piece, or after each token."""
        count = self.piece.count
        ends: list[tuple[UOp, UOp | None]] = [(count, self.has_tokens)]
        if self.checks:
            ends = [(UOp.const(t + 1, INDEX), t < count) for t in range(self.runs.tokens)]
        stores: list[UOp] = []
        for t, (end, is_end) in enumerate(ends):
            at, state = self._channel(channel), self.state_after(end)
            stores += self.heads.keep(*at, end, state, all_of(ok, is_end), slot + 100 * t, [done])
        return stores


@functools.cache
def delta_scan(heads: DeltaHeads, runs: Runs, several: bool, checks: bool = False) -> Kernel:
    """The state over the piece that begins at the first row, or over `several`. If it `checks`, groups have one token,
    and each leaves a state. `runs`: those of the product with channels. Buffers: products, those with the state,
    float32 (tokens, width); memory; what `delta_inputs` makes: vectors and coefficients; sums, prompt and conv, as
    there.

    A block has some columns of a head's state, and makes their values. Each of its threads has some keys of four
    columns; their products with the group's keys and queries meet in shared memory. A thread for each column finds
    what the state learns. Then each changes its part. The next group is loaded meanwhile."""
    assert not checks or heads.slots > runs.tokens

    def kernel(
        products: UOp, memory: UOp, vectors: UOp, coefficients: UOp, sums: Sequence[UOp], prompt: UOp, conv: UOp,
    ) -> UOp:  # fmt: skip
        block = _ScanBlock(heads, runs, several, checks, memory, vectors, coefficients, sums, prompt, conv)
        done, state = block.scanned(products)
        n_ops = runs.tokens * heads.width * heads.size * 6
        name = (
            f"delta_scan_{heads.name}_{heads.sequences}_{runs.tokens}"
            + "_several" * several
            + "_checks" * checks
        )
        return finish(name, block.kept(state, done), 8 * heads.width * heads.size, n_ops)

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
