"""What a block of decode attention works on, the new token's rotated queries and key, and the result; and how the
results of several blocks are combined."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinygrad import UOp

from engine.kernels.kernel import Kernel, Name
from engine.targets.nvidia.kernels.angles import angle_row
from engine.targets.nvidia.kernels.attention.cache_tiles import store_quad
from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads, Pages
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    LOG2_E,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_index,
    load_run,
    maximum,
    rotated,
    shared,
    store,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted, permuted_size


def block_buffers(
    heads: Heads, splits: int, sinks: bool, tokens: int
) -> tuple[tuple[Name, ...], tuple[Name, ...]]:
    """The names of the outputs and of the inputs of a kernel with a `DecodeBlock`."""
    is_whole = splits == 1
    return (
        is_whole and "out",
        not is_whole and "sums",
        not is_whole and "tops",
        ("cache", len(heads.cache_planes)),
    ), (
        "rows",
        not tokens and "angles",
        tokens > 0 and "cos",
        tokens > 0 and "sin",
        "tables",
        "state",
        heads.norm_eps is not None and "norms",
        heads.temperature and "temperature",
        heads.sloped and "slopes",
        sinks and is_whole and "sinks",
        is_whole and not tokens and "input_scale",
    )


class DecodeBlock:
    """A block of decode attention: `group` query heads from `first_head` on, which share the key head `kv`, and `count`
    cached tokens from `start` on: those before `position`, or those of them in the window, from a multiple of sixteen
    on (`sees`), of which a block takes one of `splits` parts. The blocks of the first part also handle the new token,
    unless it is among the cached ones (`Heads.has_new`). A `group` of 0 is of a block that only stores the new token.

    Buffers: cache, the cached keys and values (`Heads.cache_planes`); rows, the new token's queries, keys and values,
    float32 (`Heads.rows`,), with gates before them if heads are gated; angles, cos and sin of its angles, float32
    (dim,); tables, those of blocks, int32 (sequences, `Heads.table_size`); state, int32 (3,): token, position and
    sequence; norms, the weights of the queries' and the keys' norm, float32 (2, dim), if there are norms, or if they
    are `over_heads`, over all heads together, or centred, float32 (query + kv, dim); temperature, the factors of
    queries by position, float32 (context,), if there are any; slopes, float32 (query,), of sloped heads; with one
    split, sinks, float32 (query,), if there are any, and input_scale, the output's, float32 (UNIT,).

    A sink is a score of each query head that is not scaled and weighs no value.

    With `tokens`, a step of so many sequences. The rows are of all tokens, one after the other; in place of the angles
    are cos and sin, their tables, float32 (context, dim / 2). The state is int32 (4, tokens): tokens, positions,
    sequences, and whether there is a token, else it is not stored. Outputs have the results of all tokens: with one
    split, the activations of the next product, float16 in an `order`, from `out_row` on, and no input_scale; with
    several, sums (splits, tokens, query * dim), and scores and sums of weights (splits, tokens, query, 2).

    The output with one split: out, float32, permuted and scaled for the next product. With several, for `combine`:
    sums, the weighted sums of values, float32 (splits, query * dim), and tops, for each split and query head the
    largest score and the sum of weights, float32 (splits, query, 2).
    """

    def __init__(
        self, heads: Heads, splits: int, group: int, thread: UOp, n_threads: int, buffers: Mapping[str, Any],
        over_heads: bool, tokens: int, order: Order = "columns", out_row: int = 0,
    ) -> None:  # fmt: skip
        self.outs: list[UOp] = [buffers[name] for name in ("out", "sums", "tops") if name in buffers]
        self.cache: list[UOp] = buffers["cache"]
        self.rows: UOp = buffers["rows"]
        self.tokens, self.is_whole, self._over_heads = tokens, splits == 1, over_heads
        self._order, self._out_row = order, out_row
        angles: list[UOp] = [buffers[name] for name in ("cos", "sin", "angles") if name in buffers]
        self._state = state = buffers["state"]
        temperature = buffers.get("temperature")
        self.norms: UOp | None = buffers.get("norms")
        self.sinks: UOp | None = buffers.get("sinks")
        self.slopes: UOp | None = buffers.get("slopes")
        self.input_scale: UOp | None = buffers.get("input_scale")
        self.heads, self.group, self.thread, self.n_threads = heads, group, thread, n_threads
        blocks = heads.query // group if group else heads.kv
        blocks_of_kv = blocks // heads.kv
        self.number = UOp.special(blocks * max(tokens, 1), "gidx0")
        self.token = UOp.const(0)
        if tokens:
            self.token, self.number = self.number // blocks, self.number % blocks
        self.has_new = heads.has_new
        self._first_gate = self.token * heads.rows
        self._first_row = self._first_gate + heads.first_row
        self.first_head, self.kv = self.number * group, self.number // blocks_of_kv
        self.part = UOp.special(splits, "gidx1") if splits > 1 else UOp.const(0)
        place = self.token + tokens if tokens else 1
        self.position = load_index(state, place, heads.length)
        self.pages = Pages.of(heads, buffers["tables"], state, self.token + 2 * tokens if tokens else 2)
        self._angles = self._angle_loads(angles)
        self._value_factor: UOp | None = None
        self.query_factor = f32(heads.query_scale)
        if temperature is not None:
            self.query_factor = self.query_factor * load(temperature, self.position)
        self.first_seen = heads.first_seen(self.position)
        stop = self.position if self.has_new else self.position + 1
        self.start, self.count = UOp.const(0), stop
        if heads.window:
            self.start = self.first_seen // TILE * TILE
            self.count = (stop - self.start).maximum(0)
        self.is_first_part = self.part.eq(0)
        is_first_of_kv = (self.number % blocks_of_kv).eq(0)
        self.stores_token = self.is_first_part & is_first_of_kv
        if tokens:
            self.stores_token = self.stores_token & load(state, self.token + 3 * tokens).ne(0)

    def _angle_loads(self, buffers: Sequence[UOp]) -> Callable[[UOp], tuple[UOp, UOp]]:
        """A function that loads cos and sin of the angle of a pair."""
        half = self.heads.dim // 2
        if self.tokens:
            cos, sin = buffers
            sequence_at = self.token + 2 * self.tokens
            row = angle_row(cos, half, self.heads.length, self.position, self._state, sequence_at) * half
            return lambda pair: (load(cos, row + pair), load(sin, row + pair))
        return lambda pair: (load(buffers[0], pair), load(buffers[0], pair + half))

    def sloped(self, token: UOp, score: UOp, slope: UOp | None) -> UOp:
        """A score of a cached token, counted from `start`, of a head with a slope."""
        distance = self.position - (self.start + token)
        return score if slope is None else score - slope * distance.cast(F32)

    def slope(self, head: UOp) -> UOp | None:
        """The slope of one of the block's heads, for scores of `query_scale`, if heads are sloped."""
        return None if self.slopes is None else load(self.slopes, self.first_head + head) * f32(LOG2_E)

    def sees(self, token: UOp) -> UOp:
        """Whether the new token sees a cached token, counted from `start`."""
        within = token < self.count
        return within & (self.start + token >= self.first_seen) if self.heads.window else within

    @property
    def _n_turned(self) -> int:
        """Heads that are rotated: queries, and the key if there is a new one."""
        return self.group + self.has_new

    @property
    def n_rotated(self) -> int:
        """Elements of the rotated queries and the key, rounded up to whole elements for each thread."""
        return -(-self._n_turned * self.heads.dim // self.n_threads) * self.n_threads

    def rotate(self, before: Sequence[UOp]) -> list[tuple[UOp, UOp]]:
        """Rotates (and norms, if the model does) this thread's elements of the queries and the key. `before`: effects
        that happen before the norm. If values are normed, `value_factor` is that of the new one from then on.

        Returns the elements as (index in (group + 1, dim), float32): the queries scaled, and the key rounded to
        float16."""
        h, dim, half = self.heads, self.heads.dim, self.heads.dim // 2

        def first_row(head: UOp) -> UOp:
            """The first of a head's rows, of those of the token; head `group` is the key, the next one the value."""
            nth = self.first_head + head
            for number, (first, kept) in enumerate(((h.query, self.has_new), (h.query + h.kv, extra))):
                nth = head.eq(self.group + number).where(first + self.kv, nth) if kept else nth
            return nth * dim  # seen to be a multiple, so that a run of elements is one load

        extra = h.normed_values and h.stored == "keys and values"  # keys that are values have their factor
        indices = [self.thread + i * self.n_threads for i in range(self.n_rotated // self.n_threads)]
        heads = [(e // dim).minimum(self._n_turned - 1) for e in indices]
        partners = [(e % dim < half).where(e % dim + half, e % dim - half) for e in indices]
        own = self._first_row
        xs = [
            load(self.rows, own + first_row(head) + e % dim) for head, e in zip(heads, indices, strict=True)
        ]
        others = [load(self.rows, own + first_row(head) + p) for head, p in zip(heads, partners, strict=True)]
        factors: list[UOp | None] = [None] * len(indices)  # of rotated elements
        if self.norms is not None and self._over_heads:
            totals = self._sums_over_heads(before)
            half_threads = self.n_threads // 2
            for i, (head, e) in enumerate(zip(heads, indices, strict=True)):
                is_key, row = head.eq(self.group), first_row(head)
                total = tree(load_run(totals, is_key.where(UOp.const(half_threads), 0), half_threads))
                mean = total * is_key.where(f32(1 / (h.kv * dim)), f32(1 / (h.query * dim)))
                norm = inverse_rms(mean, 1, h.norm_eps or 0.0)
                xs[i] = xs[i] * load(self.norms, row + e % dim) * norm
                others[i] = others[i] * load(self.norms, row + partners[i]) * norm
        elif self.norms is not None:  # sums of squares of a few elements each
            n = (self._n_turned + extra) * dim
            few = next(k for k in (16, 8, 32, 64) if dim % k == 0 and n // k <= self.n_threads)
            sums, has_sum = shared(n // few, slot=4), self.thread < n // few
            first = own + first_row(self.thread // (dim // few)) + self.thread % (dim // few) * few
            run = load_run(self.rows, first, few, has_sum)
            own_stores = [store(sums, self.thread, chain(x * x for x in run), has_sum)]
            means = shared(n // few, slot=14) if h.centred else sums
            if h.centred:
                own_stores.append(store(means, self.thread, chain(run), has_sum))
            done = UOp.group(*own_stores, *before)
            sums, means = sums.after(done), means.after(done)

            def mean(head: UOp) -> UOp:
                return tree(load_run(means, head * (dim // few), dim // few)) * f32(1 / dim)

            def factor(head: UOp | int) -> UOp:
                total = tree(load_run(sums, head * (dim // few), dim // few))
                if h.centred and isinstance(head, UOp):
                    total = (total - mean(head) * mean(head) * f32(dim)).maximum(0.0)
                return inverse_rms(total, dim, h.norm_eps or 0.0)

            if h.normed_values and self.has_new:
                self._value_factor = factor(self.group + extra)
            for i, (head, e) in enumerate(zip(heads, indices, strict=True)):
                norm, is_key, row = factor(head), head.eq(self.group), first_row(head)
                own_weight = load(self.norms, h.norm_place(row, is_key, e % dim))
                if h.centred:
                    xs[i], others[i] = xs[i] - mean(head), others[i] - mean(head)
                if h.rotates_first:
                    xs[i], others[i], factors[i] = xs[i] * norm, others[i] * norm, own_weight
                    continue
                xs[i] = xs[i] * own_weight * norm
                others[i] = others[i] * load(self.norms, h.norm_place(row, is_key, partners[i])) * norm
        elements = []
        for e, x, other, weight in zip(indices, xs, others, factors, strict=True):
            d = e % dim
            z = rotated(x, other, d < half, *self._angles(d % half))
            z = z if weight is None else z * weight
            as_key, as_query = z.cast(F16).cast(F32), z * self.query_factor
            is_key = e >= self.group * dim
            elements.append((e, is_key.where(as_key, as_query) if self.has_new else as_query))
        return elements

    def new_value(self, array: UOp, first: UOp | int, width: int) -> list[UOp]:
        """The stores of `width` dimensions of the new token's value, from `first` on, to shared memory, float32. Their
        place is after `rotate`."""
        stores = []
        head = self.heads.query + (self.heads.kv if self.heads.stored == "keys and values" else 0) + self.kv
        for start in range(0, width, self.n_threads):
            place = self.thread + start
            ok = None if start + self.n_threads <= width else place < width
            value = load(self.rows, self._first_row + head * self.heads.dim + first + place, ok)
            if self._value_factor is not None:
                value = value * self._value_factor
            stores.append(store(array, place, value, ok))
        return stores

    def _sums_over_heads(self, before: Sequence[UOp]) -> UOp:
        """Shared memory (n_threads,): partial sums of squares of all queries, then as many of all keys."""
        h, n = self.heads, self.n_threads // 2
        n_queries, n_keys = h.query * h.dim, h.kv * h.dim
        is_query = self.thread < n
        start, size = is_query.where(UOp.const(0), n_queries), is_query.where(UOp.const(n_queries), n_keys)
        places = [(self.thread % n + i * n) * 4 for i in range(-(-max(n_queries, n_keys) // (4 * n)))]
        runs = [load_run(self.rows, self._first_row + start + place, 4, place < size) for place in places]
        squares = chain(x * x for run in runs for x in run)
        sums = shared(self.n_threads, slot=4)
        return sums.after(UOp.group(store(sums, self.thread, squares), *before))

    def store_token(self, rows: UOp, values: UOp, run: UOp | int = 0, width: int = 0) -> list[UOp]:
        """Stores the new token: its key, which is in shared memory after the queries, and of its value the dimensions
        of a run of `width` (0: all), which are in shared memory too (`new_value`). A thread stores four dimensions of
        each."""
        h, width = self.heads, width or self.heads.dim
        if not self.has_new:
            return []
        key, value = (self.thread.minimum(n // 4 - 1) for n in (h.dim, width))
        has_key, has_value = (self.stores_token & (self.thread < n // 4) for n in (h.dim, width))
        if width < h.dim:
            has_key = has_key & UOp.const(0).eq(run)
        at, first = (h, self.cache), UOp.const(0) - run * width
        place = self.pages.tile(self.kv, self.position // TILE), self.position
        return [
            *store_quad(*at, 0, *place, key, rows, UOp.const(self.group * h.dim), has_key),
            *store_quad(*at, 1, *place, run * (width // 4) + value, values, first, has_value),
        ]

    @property
    def n_parts(self) -> int:
        """Parts of the score of the new key: sums of eight products each, or of more if there are too few threads."""
        dim = self.heads.dim
        return next(dim // n for n in (8, 16, 32) if self.group * dim // n <= self.n_threads)

    def partial_scores(self, rotated_rows: UOp, slot: int) -> tuple[UOp, list[UOp]]:
        """The new key's scores in parts: shared memory (group, n_parts), and the stores to it."""
        dim, n = self.heads.dim, self.n_parts
        sums, has_sum = shared(self.group * n, slot), self.thread < self.group * n
        query, key = self.thread * (dim // n), self.group * dim + self.thread % n * (dim // n)
        pairs = zip(
            *(load_run(rotated_rows, first, dim // n, has_sum) for first in (query, key)), strict=True
        )
        return sums, [store(sums, self.thread, chain(a * b for a, b in pairs), has_sum)]

    def gate(self, element: UOp, valid: UOp | None) -> UOp:
        """What an element of the result (query * dim) is multiplied by, if heads are gated."""
        return self.heads.opened(load(self.rows, self._first_gate + self.heads.gate_row(element), valid))

    def store_result(
        self,
        element: UOp,
        head: UOp,
        is_first: UOp,
        sums: tuple[UOp, UOp, UOp],
        input_scale: UOp | None,
        sink: UOp | None,
        gate: UOp | None,
    ) -> list[UOp]:
        """Stores an element of (query * dim), which belongs to head `first_head + head`; `is_first`: whether it is the
        head's first. `sums`: the weighted sum of values, the sum of weights, and the largest score. `input_scale`: the
        output's, if there is one split. `sink`, `gate`: the head's and the element's, if there are such."""
        values, weights, top = sums
        n = self.heads.query * self.heads.dim
        if sink is not None:
            weights = weights + (sink * f32(LOG2_E) - top).exp2()  # if infinite, the result is zero
        if gate is not None:
            values = values * gate
        if self.is_whole and self.tokens:
            result = as_half(values / weights)
            return [store(self.outs[0], PLACES[self._order](self._out_row + self.token, element, n), result)]
        if input_scale is not None:
            place, column, is_kept = placed(self.heads, element)
            result = values / weights * load(input_scale, column % UNIT)
            return [store(self.outs[0], place, result, is_kept)]
        part = self.part * self.tokens + self.token if self.tokens else self.part
        index = (part * self.heads.query + self.first_head + head) * 2
        return [
            store(self.outs[0], part * n + element, values),
            store(self.outs[1], index, top, is_first),
            store(self.outs[1], index + 1, weights, is_first),
        ]


def placed(heads: Heads, element: UOp) -> tuple[UOp, UOp, UOp | None]:
    """Where the next product expects an element of the result of a token (query * dim), permuted; its column there; and
    whether it is kept (None: always)."""
    if not heads.latent:
        return permuted(element, heads.query * heads.dim), element, None
    head, half, d = element // heads.dim, heads.dim // 2, element % heads.dim
    before = half - heads.latent // 2
    column = (d // half * (heads.latent // 2) + d % half - before).maximum(0)
    place = head * permuted_size(heads.latent) + permuted(column, heads.latent)
    return place, column, d % half >= before


def result_size(heads: Heads) -> int:
    """Elements of the result of a token."""
    if heads.latent:
        return heads.query * permuted_size(heads.latent)
    return permuted_size(heads.query * heads.dim)


@functools.cache
def combine(
    heads: Heads, splits: int, has_sinks: bool = False, tokens: int = 0, order: Order = "columns", out_row: int = 0,
) -> Kernel:  # fmt: skip
    """Combines the splits of decode attention. With several `tokens`, they are those from `out_row` on of the result.
    Buffers: out, sums and tops (see `DecodeBlock`); input_scale, the output's, float32 (UNIT,), if the step is not of
    several `tokens`; sinks, float32 (query,), if there are any; of gated heads, rows, those of the QKV product."""
    n, several = heads.query * heads.dim, max(tokens, 1)

    def kernel(
        out: UOp, sums: UOp, tops: UOp, input_scale: UOp | None, sinks: UOp | None, rows: UOp | None
    ) -> UOp:
        d, head = UOp.special(heads.dim, "lidx0"), UOp.special(heads.query, "gidx0")
        token = UOp.special(tokens, "gidx1") if tokens else UOp.const(0)
        top = [load(tops, ((s * several + token) * heads.query + head) * 2) for s in range(splits)]
        weight = [load(tops, ((s * several + token) * heads.query + head) * 2 + 1) for s in range(splits)]
        largest = maximum(top)
        factor = [(t - largest).exp2() for t in top]
        element = head * heads.dim + d
        total = tree([load(sums, (s * several + token) * n + element) * f for s, f in enumerate(factor)])
        weights = tree([w * f for w, f in zip(weight, factor, strict=True)])
        if sinks is not None:
            weights = weights + (load(sinks, head) * f32(LOG2_E) - largest).exp2()
        value = total / weights
        if rows is not None:
            value = value * heads.opened(load(rows, token * heads.rows + heads.gate_row(element)))
        name = f"combine_{heads.query}_{heads.dim}_{splits}{'_sinks' * has_sinks}{heads.gate_name}"
        if input_scale is None:
            place = PLACES[order](out_row + token, element, n)
            return finish(f"{name}_{tokens}_{order}_{out_row}", [store(out, place, as_half(value))])
        place, column, is_kept = placed(heads, element)
        stores = [store(out, place, value * load(input_scale, column % UNIT), is_kept)]
        return finish(name, stores)

    inputs = "sums", "tops", not tokens and "input_scale", has_sinks and "sinks", heads.gated and "rows"
    return Kernel(kernel, ("out",), inputs)
