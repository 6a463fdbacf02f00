"""Attention of one new token, for decode: keys and values are read once, their range split over blocks.

The cache of a layer holds, for each of its heads, keys as [dim / 4, token, dim % 4] and values as
[token / 4, dim, token % 4], float16: neighbouring threads, one a token for keys and one a dimension for values,
load neighbouring 8 bytes, and the same quads are the operands of tensor cores in prefill.

A block takes `group` query heads that share keys and one of `splits` equal parts of the tokens so far. It rotates
(and norms, where the model does) its queries and the new key itself, so that the product before it just stores
its rows; the new token is the first split's business and is also put into the cache by it.

Between tokens little is computed and much is waited for, so loads from the cache run one step ahead of their
use, the first of them ahead of everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.gpu.packing import UNIT, permuted
from engine.kernels.gpu.uops import (
    F16,
    F32,
    LOWEST,
    at,
    chain,
    f32,
    finish,
    half_registers,
    load,
    load_index,
    maximum,
    registers,
    shared,
    tree,
)

Kernel = Callable[..., UOp]
LOG2_E = 1.4426950408889634
_SCORES_BYTES = 36 << 10  # of a block's shared memory
SLACK = 1024  # tokens that a cache is longer than its context: loads run ahead, and take whole tiles


@dataclass(frozen=True)
class Heads:
    """The attention of a model: `query` heads share `kv` heads of keys and values, of `dim` elements each.
    `norm_eps` where queries and keys are normed. The cache has room for `length` tokens."""

    query: int
    kv: int
    dim: int
    length: int
    norm_eps: float | None

    @property
    def shared_by(self) -> int:
        """Query heads to a key head."""
        return self.query // self.kv

    @property
    def cache_size(self) -> int:
        """Elements of a layer's keys, and of its values."""
        return self.kv * self.length * self.dim

    def key_index(self, head: UOp, token: UOp, d: UOp | int) -> UOp:
        return ((head * (self.dim // 4) + d // 4) * self.length + token) * 4 + d % 4

    def value_index(self, head: UOp, token: UOp, d: UOp) -> UOp:
        return ((head * (self.length // 4) + token // 4) * self.dim + d) * 4 + token % 4


@dataclass(frozen=True)
class Split:
    """How a step's attention is cut: for up to `limit` tokens, `splits` parts, `group` heads to a block of
    `threads` threads, each with a run of one of `cuts` that a key is cut into, and with `ahead` quads of values,
    under way."""

    limit: int
    splits: int
    group: int
    threads: int
    cuts: int
    ahead: int

    @property
    def room(self) -> int:
        """Tokens that a split may have to take, in whole tiles of one token a thread."""
        part = -(-self.limit // (self.splits * 4)) * 4
        return -(-part // self.threads) * self.threads


def split_for(heads: Heads, limit: int, short: int, multiprocessors: int) -> Split:
    """For up to `short` tokens a block takes all of them; for more there is one to each multiprocessor."""
    threads = max(256, -(-heads.dim // 64) * 64)
    if limit <= short:
        return Split(limit, 1, 1, threads, 4, 4)
    group = 2 if heads.shared_by % 2 == 0 else 1
    splits = max(2, multiprocessors // heads.kv, -(-limit * group * 4 * 4 // _SCORES_BYTES))
    return Split(limit, splits, group, threads, 4, 4)


@dataclass(frozen=True)
class NewToken:
    """A block's part of the token that a step is for: `group` query heads from `first_head` on, and their key head
    `kv`, turned to the token's `position`."""

    heads: Heads
    thread: UOp
    n_threads: int
    kv: UOp
    first_head: UOp
    group: int
    position: UOp

    @property
    def size(self) -> int:
        """Elements of `turned`, queries and key, and what is left of the last thread's."""
        return -(-(self.group + 1) * self.heads.dim // self.n_threads) * self.n_threads

    def turned(
        self, rows: UOp, angles: UOp, norms: UOp | None, before: Sequence[UOp]
    ) -> tuple[list[tuple[UOp, UOp]], list[tuple[UOp, UOp, UOp]]]:
        """This thread's elements, float32, of the queries, scaled, and the key, rounded as the cache holds it:
        (place, value), places being (group + 1, dim). They are normed where the model does, `before` being done
        then. And the key's for the cache: (place, whether it is one, float16)."""
        h, dim, half = self.heads, self.heads.dim, self.heads.dim // 2
        elements = (self.group + 1) * dim

        def row_of(head: UOp) -> UOp:
            return head.eq(self.group).where((h.query + self.kv) * dim, (self.first_head + head) * dim)

        mine = [self.thread + i * self.n_threads for i in range(self.size // self.n_threads)]
        heads = [(e // dim).minimum(self.group) for e in mine]
        partners = [(e % dim < half).where(e % dim + half, e % dim - half) for e in mine]
        own = [load(rows, row_of(head) + e % dim) for head, e in zip(heads, mine, strict=True)]
        others = [load(rows, row_of(head) + p) for head, p in zip(heads, partners, strict=True)]
        if norms is not None:  # sums of squares of a few elements each
            few = next(n for n in (16, 8) if dim % n == 0)
            sums, some = shared(elements // few, slot=4), self.thread < elements // few
            assert elements // few <= self.n_threads
            first = row_of(self.thread // (dim // few)) + self.thread % (dim // few) * few
            squares = chain(x * x for x in (load(rows, first + j, some) for j in range(few)))
            sums = sums.after(UOp.group(at(sums, self.thread, some).store(squares), *before))
            for i, (head, e) in enumerate(zip(heads, mine, strict=True)):
                total = tree([load(sums, head * (dim // few) + j) for j in range(dim // few)])
                norm = (total * f32(1.0 / dim) + f32(h.norm_eps or 0.0)).sqrt().reciprocal()
                weight = head.eq(self.group).where(UOp.const(dim), UOp.const(0))
                own[i] = own[i] * load(norms, weight + e % dim) * norm
                others[i] = others[i] * load(norms, weight + partners[i]) * norm
        values, kept = [], []
        for e, x, other in zip(mine, own, others, strict=True):
            d = e % dim
            c, s = load(angles, d % half), load(angles, d % half + half)
            z = x * c + (d < half).where(other * f32(-1), other) * s
            is_key, as_key = e >= self.group * dim, z.cast(F16)
            values.append((e, is_key.where(as_key.cast(F32), z * f32(dim**-0.5 * LOG2_E))))
            kept.append((h.key_index(self.kv, self.position, d), is_key & (e < elements), as_key))
        return values, kept

    def own_scores(self, turned: UOp, slot: int) -> tuple[UOp, UOp]:
        """The new key's scores in sums of eight products, in shared memory, (group, dim / 8): it and the store."""
        eighths = self.heads.dim // 8
        sums, some = shared(self.group * eighths, slot), self.thread < self.group * eighths
        key = self.group * self.heads.dim + self.thread % eighths * 8
        pairs = [(load(turned, self.thread * 8 + k, some), load(turned, key + k, some)) for k in range(8)]
        return sums, at(sums, self.thread, some).store(chain(a * b for a, b in pairs))


@functools.cache
def attention(heads: Heads, split: Split) -> Kernel:
    """The kernel body. Buffers: with one split, the output, float32, permuted and prescaled for the product that
    takes it; otherwise sums (splits, query heads * dim) and, of each split and query head, the largest score and
    the sum of weights (splits, query heads, 2). Then the cache's keys; its values; the new token's rows of
    queries, keys and values, float32 (heads * dim); cos and sin of its angles (dim,); the state (token, position);
    the norms' weights (2, dim) where there are norms; with one split the output's prescale (UNIT,)."""
    h, n_threads, group = heads, split.threads, split.group
    dim = h.dim
    cuts, slices = split.cuts, 1 << ((n_threads // dim).bit_length() - 1)
    run, tile_tokens = dim // cuts, n_threads // cuts
    ahead = min(split.ahead, n_threads // (slices * 4))  # a step's tokens all have weights: see `tiles`
    step_quads = slices * ahead
    assert n_threads >= dim and h.shared_by % group == 0 and n_threads % (32 * cuts) == 0 and dim % 8 == 0

    def kernel(*buffers: UOp) -> UOp:
        n_outs = 1 if split.splits == 1 else 2
        outs, (keys, values, rows, angles, state, *rest) = buffers[:n_outs], buffers[n_outs:]
        thread = UOp.special(n_threads, "lidx0")
        block = UOp.special(h.query // group, "gidx0")
        part = UOp.special(split.splits, "gidx1") if split.splits > 1 else UOp.const(0)
        blocks_of_kv = h.shared_by // group
        kv = block // blocks_of_kv
        position = load_index(state, 1, h.length - SLACK)
        start, count = UOp.const(0), position
        if split.splits > 1:
            each = (position + split.splits * 4 - 1) // (split.splits * 4) * 4
            start = part * each
            count = (position - start).maximum(0).minimum(each)
        is_first = part.eq(0)
        keeps = is_first if blocks_of_kv == 1 else is_first & (block % blocks_of_kv).eq(0)

        # the first loads from the cache
        lane, cut = thread % tile_tokens, thread // tile_tokens
        column, slice_ = thread % dim, thread // dim
        if slices * dim < n_threads:
            slice_ = (slice_ < slices).where(slice_, slices - 1)

        def key_tile(tile: UOp | int) -> list[UOp]:
            token = tile * tile_tokens + lane
            place = h.key_index(kv, start + token, cut * run)
            return [load(keys, place + (j // 4 * h.length * 4 + j % 4), token < count) for j in range(run)]

        def value_step(step: UOp | int) -> list[UOp]:
            quads = [step * step_quads + j * slices + slice_ for j in range(ahead)]
            return [
                load(
                    values,
                    ((kv * (h.length // 4) + start // 4 + quad) * dim + column) * 4 + i,
                    quad * 4 < count,
                )
                for quad in quads
                for i in range(4)
            ]

        kept = half_registers()
        next_keys, next_values = registers(run, 0, kept), registers(ahead * 4, 1, kept)
        first_loads = [at(next_keys, j).store(x.cast(kept)) for j, x in enumerate(key_tile(0))]
        first_loads += [at(next_values, j).store(x.cast(kept)) for j, x in enumerate(value_step(0))]

        norms = rest.pop(0) if h.norm_eps is not None else None
        new = NewToken(h, thread, n_threads, kv, block * group, group, position)
        rotated = shared(new.size, slot=1)
        turned, kept_key = new.turned(rows, angles, norms, first_loads)
        stores = [at(rotated, e).store(x) for e, x in turned]
        cached = [at(keys, place, ok & keeps).store(x) for place, ok, x in kept_key]
        new_value = load(rows, (h.query + h.kv + kv) * dim + column).cast(F16)
        cached.append(
            at(values, h.value_index(kv, position, column), keeps & (thread < dim)).store(new_value)
        )
        rotated = rotated.after(UOp.group(*stores, *first_loads))
        next_keys, next_values = next_keys.after(rotated), next_values.after(rotated)

        # scores: a thread takes a token and one of `cuts` runs of dimensions
        tile = UOp.range((count + (tile_tokens - 1)) // tile_tokens, 0, AxisType.LOOP)
        here, loaded = rotated.after(tile), next_keys.after(tile)
        key = [load(loaded, j).cast(F32) for j in range(run)]
        stride = split.room
        scores = shared(cuts * group * stride, slot=2)
        stores = []
        for g in range(group):
            query = [load(here, g * dim + cut * run + j) for j in range(run)]
            place = (cut * group + g) * stride + tile * tile_tokens + lane
            stores.append(at(scores, place).store(_dot(key, query)))
        now = UOp.group(*stores)
        then = [at(next_keys.after(now), j).store(x.cast(kept)) for j, x in enumerate(key_tile(tile + 1))]
        fresh, new_store = new.own_scores(rotated, slot=6)
        eighths = dim // 8
        stores_of_all = UOp.group(UOp.group(now, *then).end(tile), new_store)
        scores, fresh = scores.after(stores_of_all), fresh.after(stores_of_all)

        def score(g: int | UOp, token: UOp) -> UOp:
            return tree([load(scores, (g + c * group) * stride + token) for c in range(cuts)])

        # the largest of each head: a warp takes a head, then everyone what its threads have found
        warp, warp_lane = thread // 32, thread % 32
        tiles = (count + (n_threads - 1)) // n_threads
        has_head = warp < group

        def of_warps_head(loop: UOp, of: Callable[[UOp], UOp]) -> list[UOp]:
            return [of(loop * n_threads + j * 32 + warp_lane) for j in range(n_threads // 32)]

        loop = UOp.range(has_head.where(tiles, 0), 1, AxisType.REDUCE)
        own_head = warp.minimum(group - 1)
        seen = maximum(
            of_warps_head(loop, lambda t: (t < count).where(score(own_head, t), f32(LOWEST)))
        ).reduce(loop, arg=Ops.MAX)
        largest = shared(group * 32, slot=3)
        largest = largest.after(at(largest, thread, has_head).store(seen))
        new_scores = [
            is_first.where(tree([load(fresh, g * eighths + k) for k in range(eighths)]), f32(LOWEST))
            for g in range(group)
        ]
        top = [
            maximum([new_scores[g], *(load(largest, g * 32 + j) for j in range(32))]) for g in range(group)
        ]

        # weights of tokens, in the place of the first cut's scores
        loop = UOp.range(tiles, 2, AxisType.LOOP)
        token = loop * n_threads + thread
        stores = [
            at(scores, g * stride + token).store(
                (token < count).where((score(g, token) - top[g]).exp2(), f32(0))
            )
            for g in range(group)
        ]
        weights = scores.after(UOp.group(*stores).end(loop))
        loop = UOp.range(has_head.where(tiles, 0), 3, AxisType.REDUCE)
        sum_ = tree(of_warps_head(loop, lambda t: load(weights, own_head * stride + t)))
        totals = shared(group * 32, slot=7)
        total_store = at(totals, thread, has_head).store(sum_.reduce(loop, arg=Ops.ADD))

        # their sums of values: a thread takes a dimension and every `slices`-th quad of tokens
        step = UOp.range((count + (step_quads * 4 - 1)) // (step_quads * 4), 4, AxisType.LOOP)
        loaded = next_values.after(step, weights)
        value = [load(loaded, j).cast(F32) for j in range(ahead * 4)]
        sums = registers(group, 2)
        sums = sums.after(UOp.group(*(at(sums, g).store(f32(0)) for g in range(group))))
        so_far = sums.after(step)
        stores = []
        for g in range(group):
            w = [
                load(weights, g * stride + (step * step_quads + j * slices + slice_) * 4 + i)
                for j in range(ahead)
                for i in range(4)
            ]
            products = [a * b for a, b in zip(w, value, strict=True)]
            stores.append(at(sums, g).store(chain([load(so_far, g), *products])))
        now = UOp.group(*stores)
        then = [at(next_values.after(now), j).store(x.cast(kept)) for j, x in enumerate(value_step(step + 1))]
        sums = sums.after(UOp.group(now, *then).end(step))
        partial = shared(slices * group * dim, slot=5)
        own_slice = None if slices * dim == n_threads else thread < slices * dim
        stores = [
            at(partial, (slice_ * group + g) * dim + column, own_slice).store(load(sums, g))
            for g in range(group)
        ]
        stores_of_all = UOp.group(total_store, *stores)
        partial, totals = partial.after(stores_of_all), totals.after(stores_of_all)
        weight_of = [tree([load(totals, g * 32 + j) for j in range(32)]) for g in range(group)]

        # put together, with the new token
        for i in range(-(-group * dim // n_threads)):
            e = thread + i * n_threads
            inside = None if (i + 1) * n_threads <= group * dim else e < group * dim
            head = e // dim if group > 1 else UOp.const(0)
            new_score, head_top = _pick(new_scores, head), _pick(top, head)
            new_weight = is_first.where((new_score - head_top).exp2(), f32(0))
            total = tree([load(partial, k * group * dim + e, inside) for k in range(slices)])
            weight = _pick(weight_of, head)
            # a thread's elements are all of its column where a block's width is a multiple of dim
            mine = (
                new_value
                if n_threads % dim == 0
                else load(rows, (h.query + h.kv + kv) * dim + e % dim).cast(F16)
            )
            total, weight = total + new_weight * mine.cast(F32), weight + new_weight
            element = block * (group * dim) + e
            if split.splits == 1:
                scaled = total / weight * load(rest[-1], element % UNIT)
                cached.append(at(outs[0], permuted(element, h.query * dim), inside).store(scaled))
            else:
                sums_out, tops_out = outs
                cached.append(at(sums_out, part * (h.query * dim) + element, inside).store(total))
                place = (part * h.query + block * group + head) * 2
                one = (e % dim).eq(0) if inside is None else inside & (e % dim).eq(0)
                cached += [
                    at(tops_out, place, one).store(head_top),
                    at(tops_out, place + 1, one).store(weight),
                ]
        name = f"attention_{h.query}_{h.kv}_{dim}_{split.limit}_{split.splits}_{group}_{n_threads}_{cuts}_{ahead}"
        return finish(name, cached)

    return kernel


def _dot(a: Sequence[UOp], b: Sequence[UOp]) -> UOp:
    products = [x * y for x, y in zip(a, b, strict=True)]
    return tree([chain(products[k::4]) for k in range(4)])


def _pick(values: Sequence[UOp], index: UOp) -> UOp:
    picked = values[0]
    for i, value in enumerate(values[1:], 1):
        picked = index.eq(i).where(value, picked)
    return picked


@functools.cache
def combine(heads: Heads, splits: int) -> Kernel:
    """Puts the splits of `attention` together. Buffers: the output, permuted and prescaled; sums; the largest
    scores and sums of weights; the output's prescale (UNIT,)."""

    def kernel(out: UOp, sums: UOp, tops: UOp, prescale: UOp) -> UOp:
        d, head = UOp.special(heads.dim, "lidx0"), UOp.special(heads.query, "gidx0")
        top = [load(tops, (s * heads.query + head) * 2) for s in range(splits)]
        weight = [load(tops, (s * heads.query + head) * 2 + 1) for s in range(splits)]
        largest = maximum(top)
        factor = [(t - largest).exp2() for t in top]
        element = head * heads.dim + d
        total = tree([load(sums, s * (heads.query * heads.dim) + element) * f for s, f in enumerate(factor)])
        value = total / tree([w * f for w, f in zip(weight, factor, strict=True)])
        place = permuted(element, heads.query * heads.dim)
        stores = [at(out, place).store(value * load(prescale, element % UNIT))]
        return finish(f"combine_{heads.query}_{heads.dim}_{splits}", stores)

    return kernel
