"""Attention of one new token, for decode: keys and values are read once, their range split over blocks.

The cache of a layer holds, for each of its heads, keys as [dim / 4, token, dim % 4] and values as
[token / 4, dim, token % 4], float16: neighbouring threads, one a token for keys and one a dimension for values,
load neighbouring 8 bytes, and the same quads are the operands of tensor cores in prefill.

A block takes `group` query heads that share keys and one of `splits` equal parts of the tokens so far. It rotates
(and norms, where the model does) its queries and the new key itself, so that the product before it just stores
its rows; the new token is the first split's business and is also put into the cache by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.packing import UNIT, permuted
from engine.kernels.uops import (
    F16,
    F32,
    LOWEST,
    at,
    chain,
    f32,
    finish,
    load,
    load_index,
    maximum,
    shared,
    tree,
)

Kernel = Callable[..., UOp]
_LOG2_E = 1.4426950408889634
_UNROLL = 4  # quads of tokens that a thread has in flight
SLACK = 1024  # tokens that a cache is longer than its context: loops read whole tiles


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

    def key_index(self, head: UOp, token: UOp, d: UOp) -> UOp:
        return ((head * (self.dim // 4) + d // 4) * self.length + token) * 4 + d % 4

    def value_index(self, head: UOp, token: UOp, d: UOp) -> UOp:
        return ((head * (self.length // 4) + token // 4) * self.dim + d) * 4 + token % 4


@dataclass(frozen=True)
class Split:
    """How a step's attention is cut: for up to `limit` tokens, `splits` parts, `group` heads to a block of
    `threads` threads."""

    limit: int
    splits: int
    group: int
    threads: int

    @property
    def room(self) -> int:
        """Tokens that a split may have to take, in whole tiles of one token a thread."""
        part = -(-self.limit // (self.splits * 4)) * 4
        return -(-part // self.threads) * self.threads

    def cuts(self, dim: int) -> int:
        """Runs that a head's dimensions are cut into: enough for a thread to hold its share of all queries."""
        return next(c for c in (2, 4, 8, 16) if (self.group == 1 or self.group * dim // c <= 64) and dim // c % 4 == 0)


@functools.cache
def attention(heads: Heads, split: Split) -> Kernel:
    """The kernel body. Buffers: with one split, the output, float32, permuted and prescaled for the product that
    takes it; otherwise sums (splits, query heads * dim) and, of each split and query head, the largest score and
    the sum of weights (splits, query heads, 2). Then keys; values; the new token's rows of queries, keys and
    values, float32 (heads * dim); cos and sin (length, dim / 2); the state (token, position); the norms' weights
    (2, dim) where there are norms; with one split the output's prescale (UNIT,)."""
    h, n_threads, group = heads, split.threads, split.group
    dim, quads = h.dim, h.dim // 4
    slices = 1 << ((n_threads // dim).bit_length() - 1)
    assert n_threads >= dim and h.shared_by % group == 0 and n_threads % 32 == 0

    def kernel(*buffers: UOp) -> UOp:
        n_outs = 1 if split.splits == 1 else 2
        outs, (keys, values, rows, cos, sin, state, *rest) = buffers[:n_outs], buffers[n_outs:]
        thread = UOp.special(n_threads, "lidx0")
        block = UOp.special(h.query // group, "gidx0")
        part = UOp.special(split.splits, "gidx1") if split.splits > 1 else UOp.const(0)
        kv = block // (h.shared_by // group)
        position = load_index(state, 1, h.length - SLACK)
        if split.splits == 1:
            start, count = UOp.const(0), position
        else:
            each = (position + split.splits * 4 - 1) // (split.splits * 4) * 4
            start = part * each
            count = (position - start).maximum(0).minimum(each)

        # the block's queries and the new key, rotated: (group + 1, dim)
        elements = (group + 1) * dim
        per_thread = -(-elements // n_threads)
        whole = elements % n_threads == 0
        mine = [thread + i * n_threads for i in range(per_thread)]
        ok = [None if whole or (i + 1) * n_threads <= elements else e < elements for i, e in enumerate(mine)]
        row = [
            (e < group * dim).where(block * (group * dim) + e, (h.query + kv) * dim + (e - group * dim)) for e in mine
        ]
        raw = [load(rows, r, v) for r, v in zip(row, ok, strict=True)]
        half = dim // 2
        d = [e % dim for e in mine]
        partner = [(x < half).where(r + half, r - half) for x, r in zip(d, row, strict=True)]
        other = [load(rows, p, v) for p, v in zip(partner, ok, strict=True)]
        if h.norm_eps is not None:
            weights = rest[0]
            all_raw = shared(per_thread * n_threads, slot=0)
            all_raw = all_raw.after(UOp.group(*[at(all_raw, e).store(x) for e, x in zip(mine, raw, strict=True)]))
            for i, e in enumerate(mine):
                head = least_head(e // dim, group) * dim
                squares = [[load(all_raw, head + j * 4 + k) for k in range(4)] for j in range(quads)]
                mean = tree([chain(x * x for x in quad) for quad in squares]) * f32(1.0 / dim)
                norm = (mean + f32(h.norm_eps)).sqrt().reciprocal()
                w = (e >= group * dim).where(UOp.const(dim), UOp.const(0))
                raw[i] = raw[i] * load(weights, w + d[i], ok[i]) * norm
                pair = (d[i] < half).where(d[i] + half, d[i] - half)
                other[i] = other[i] * load(weights, w + pair, ok[i]) * norm
        rotated = shared(per_thread * n_threads, slot=1)
        stores, cached = [], []
        for e, x, y, dd, v in zip(mine, raw, other, d, ok, strict=True):
            angle = position * half + dd % half
            c, s = load(cos, angle, v), load(sin, angle, v)
            z = x * c + (dd < half).where(y * f32(-1), y) * s
            is_key = e >= group * dim
            as_key = z.cast(F16)
            stores.append(at(rotated, e).store(is_key.where(as_key.cast(F32), z * f32(dim**-0.5 * _LOG2_E))))
            first = (block % (h.shared_by // group)).eq(0) & part.eq(0)
            keep = is_key & first if v is None else is_key & first & v
            cached.append(at(keys, h.key_index(kv, position, dd), keep).store(as_key))
        rotated = rotated.after(UOp.group(*stores))

        # scores: a thread takes a token and one of `cuts` runs of dimensions
        cuts, run = split.cuts(dim), dim // split.cuts(dim)
        tile_tokens = n_threads // cuts
        lane, cut = thread % tile_tokens, thread // tile_tokens
        tile = UOp.range((count + (tile_tokens - 1)) // tile_tokens, 0, AxisType.LOOP)
        token = tile * tile_tokens + lane
        mine_of = [[load(rotated, g * dim + cut * run + j) for j in range(run)] for g in range(group + 1)]
        quad = [load(keys, h.key_index(kv, start + token, cut * run + j)).cast(F32) for j in range(run)]
        stride = split.room + 1  # the new token's scores come last
        pieces = shared(cuts * group * stride, slot=2)
        at_cut = [(cut * group + g) * stride for g in range(group)]
        stores = [at(pieces, at_cut[g] + token).store(_dot(quad, mine_of[g])) for g in range(group)]
        news = [at(pieces, at_cut[g] + split.room, lane.eq(0)).store(_dot(mine_of[-1], mine_of[g])) for g in range(group)]
        pieces = pieces.after(UOp.group(UOp.group(*stores).end(tile), *news))
        is_first = part.eq(0)
        new_scores = [
            is_first.where(tree([load(pieces, (c * group + g) * stride + split.room) for c in range(cuts)]), f32(LOWEST))
            for g in range(group)
        ]
        tiles = (count + (n_threads - 1)) // n_threads
        tile = UOp.range(tiles, 4, AxisType.LOOP)
        token = tile * n_threads + thread
        scores = shared(group * split.room, slot=5)
        stores = []
        for g in range(group):
            score = tree([load(pieces, (c * group + g) * stride + token) for c in range(cuts)])
            stores.append(at(scores, g * split.room + token).store((token < count).where(score, f32(LOWEST))))
        scores = scores.after(UOp.group(*stores).end(tile))

        # the largest of each head, in two steps
        warp_lane = thread % 32
        again = UOp.range(tiles, 1, AxisType.REDUCE)
        largest = shared(group * 32, slot=3)
        stores = []
        for g in range(group):
            seen = [load(scores, g * split.room + again * n_threads + j * 32 + warp_lane) for j in range(n_threads // 32)]
            stores.append(
                at(largest, g * 32 + warp_lane, thread < 32).store(maximum(seen).reduce(again, arg=Ops.MAX))
            )
        largest = largest.after(UOp.group(*stores))
        top = [maximum([new_scores[g], *(load(largest, g * 32 + j) for j in range(32))]) for g in range(group)]

        # weights of tokens
        third = UOp.range(tiles, 2, AxisType.LOOP)
        stores = []
        for g in range(group):
            place = g * split.room + third * n_threads + thread
            stores.append(at(scores, place).store((load(scores, place) - top[g]).exp2()))
        scores = scores.after(UOp.group(*stores).end(third))

        # their sums of values: a thread takes a dimension and every `slices`-th quad of tokens
        column, slice_ = thread % dim, thread // dim
        if slices * dim < n_threads:
            slice_ = (slice_ < slices).where(slice_, slices - 1)
        steps = (count + (slices * _UNROLL * 4 - 1)) // (slices * _UNROLL * 4)
        step = UOp.range(steps, 3, AxisType.REDUCE)
        sums: list[list[UOp]] = [[] for _ in range(group)]
        totals: list[list[UOp]] = [[] for _ in range(group)]
        for j in range(_UNROLL):
            quad = step * (slices * _UNROLL) + j * slices + slice_
            for i in range(4):
                value = load(values, ((kv * (h.length // 4) + start // 4 + quad) * dim + column) * 4 + i).cast(F32)
                for g in range(group):
                    weight = load(scores, g * split.room + quad * 4 + i)
                    sums[g].append(weight * value)
                    totals[g].append(weight)
        width = dim + 1
        partial = shared(slices * group * width, slot=4)
        stores = []
        own = None if slices * dim == n_threads else thread < slices * dim
        for g in range(group):
            place = (slice_ * group + g) * width
            stores.append(at(partial, place + column, own).store(chain(sums[g]).reduce(step, arg=Ops.ADD)))
            stores.append(
                at(partial, place + dim, column.eq(0) if own is None else column.eq(0) & own).store(
                    chain(totals[g]).reduce(step, arg=Ops.ADD)
                )
            )
        partial = partial.after(UOp.group(*stores))

        # put together, with the new token
        new_value = load(rows, (h.query + h.kv + kv) * dim + thread % dim).cast(F16)
        first = (block % (h.shared_by // group)).eq(0) & part.eq(0) & (thread < dim)
        cached.append(at(values, h.value_index(kv, position, thread % dim), first).store(new_value))
        for i in range(-(-group * dim // n_threads)):
            e = thread + i * n_threads
            inside = None if (i + 1) * n_threads <= group * dim else e < group * dim
            head = e // dim if group > 1 else UOp.const(0)
            new_score, head_top = _pick(new_scores, head), _pick(top, head)
            new_weight = is_first.where((new_score - head_top).exp2(), f32(0))
            value = load(rows, (h.query + h.kv + kv) * dim + e % dim).cast(F16).cast(F32)
            base = head * width
            total = tree([load(partial, base + k * group * width + e % dim, inside) for k in range(slices)])
            weight = tree([load(partial, base + k * group * width + dim, inside) for k in range(slices)])
            total, weight = total + new_weight * value, weight + new_weight
            element = block * (group * dim) + e
            if split.splits == 1:
                scaled = total / weight * load(rest[-1], element % UNIT, inside)
                cached.append(at(outs[0], permuted(element, h.query * dim), inside).store(scaled))
            else:
                sums_out, tops_out = outs
                cached.append(at(sums_out, part * (h.query * dim) + element, inside).store(total))
                place = (part * h.query + block * group + head) * 2
                one = (e % dim).eq(0) if inside is None else inside & (e % dim).eq(0)
                cached += [at(tops_out, place, one).store(head_top), at(tops_out, place + 1, one).store(weight)]
        name = f"attention_{h.query}_{h.kv}_{dim}_{split.limit}_{split.splits}_{group}"
        return finish(name, cached)

    return kernel


def least_head(head: UOp, limit: int) -> UOp:
    """Threads beyond the last head's elements take the last head."""
    return (head < limit).where(head, limit)


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
