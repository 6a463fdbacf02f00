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

from engine.kernels.packing import UNIT, permuted
from engine.kernels.uops import (
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
_LOG2_E = 1.4426950408889634
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
    `threads` threads, each with `ahead` quads of values under way."""

    limit: int
    splits: int
    group: int
    threads: int
    ahead: int = 4

    @property
    def room(self) -> int:
        """Tokens that a split may have to take, in whole tiles of one token a thread."""
        part = -(-self.limit // (self.splits * 4)) * 4
        return -(-part // self.threads) * self.threads

    def cuts(self, dim: int) -> int:
        """Runs that a head's dimensions are cut into: enough for a thread to hold its share of all queries."""
        return next(
            c for c in (2, 4, 8, 16) if (self.group == 1 or self.group * dim // c <= 64) and dim // c % 4 == 0
        )


@functools.cache
def attention(heads: Heads, split: Split, apart: bool) -> Kernel:
    """The kernel body. Buffers: with one split, the output, float32, permuted and prescaled for the product that
    takes it; otherwise sums (splits, query heads * dim) and, of each split and query head, the largest score and
    the sum of weights (splits, query heads, 2). Then the cache's keys; its values; the new token's rows of
    queries, keys and, unless they are in an array `apart`, values, float32 (heads * dim); that array; cos and sin
    of its angles (dim,); the state (token, position); the norms' weights (2, dim) where there are norms; with one
    split the output's prescale (UNIT,)."""
    h, n_threads, group = heads, split.threads, split.group
    dim, half = h.dim, h.dim // 2
    cuts, slices = split.cuts(dim), 1 << ((n_threads // dim).bit_length() - 1)
    run, tile_tokens = dim // cuts, n_threads // cuts
    ahead = min(split.ahead, n_threads // (slices * 4))  # a step's tokens all have weights: see `tiles`
    step_quads = slices * ahead
    assert n_threads >= dim and h.shared_by % group == 0 and n_threads % (32 * cuts) == 0 and dim % 8 == 0

    def kernel(*buffers: UOp) -> UOp:
        n_outs = 1 if split.splits == 1 else 2
        outs, (keys, values, rows, *rest) = buffers[:n_outs], buffers[n_outs:]
        value_rows, value_row = (rest.pop(0), 0) if apart else (rows, (h.query + h.kv) * dim)
        angles, state, *rest = rest
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
            token = start + tile * tile_tokens + lane
            return [load(keys, h.key_index(kv, token, cut * run + j)) for j in range(run)]

        def value_step(step: UOp | int) -> list[UOp]:
            quads = [start // 4 + step * step_quads + j * slices + slice_ for j in range(ahead)]
            return [
                load(values, ((kv * (h.length // 4) + quad) * dim + column) * 4 + i)
                for quad in quads
                for i in range(4)
            ]

        kept = half_registers()
        next_keys, next_values = registers(run, 0, kept), registers(ahead * 4, 1, kept)
        first_loads = [at(next_keys, j).store(x.cast(kept)) for j, x in enumerate(key_tile(0))]
        first_loads += [at(next_values, j).store(x.cast(kept)) for j, x in enumerate(value_step(0))]

        # the block's queries and the new key, rotated: (group + 1, dim)
        elements = (group + 1) * dim
        rotated = shared(-(-elements // n_threads) * n_threads, slot=1)
        mine_of = [thread + i * n_threads for i in range(-(-elements // n_threads))]
        unnormed = shared(len(mine_of) * n_threads, slot=4)
        stores, cached, loaded_rows = [], [], []
        for e in mine_of:
            head, d, is_key = (e // dim).minimum(group), e % dim, e >= group * dim
            first_row = is_key.where((h.query + kv) * dim, block * (group * dim) + head * dim)
            partner = (d < half).where(d + half, d - half)
            loaded_rows.append(
                (head, d, is_key, partner, load(rows, first_row + d), load(rows, first_row + partner))
            )
        if h.norm_eps is not None:
            raw = [at(unnormed, e).store(own) for e, (*_, own, _) in zip(mine_of, loaded_rows, strict=True)]
            unnormed = unnormed.after(UOp.group(*raw, *first_loads))
        for e, (head, d, is_key, partner, own, other) in zip(mine_of, loaded_rows, strict=True):
            if h.norm_eps is not None:
                place = head * dim
                squares = [[load(unnormed, place + j + k) for k in range(4)] for j in range(0, dim, 4)]
                mean = tree([chain(x * x for x in quad) for quad in squares]) * f32(1.0 / dim)
                norm = (mean + f32(h.norm_eps)).sqrt().reciprocal()
                weight = is_key.where(UOp.const(dim), UOp.const(0))
                own = own * load(rest[0], weight + d) * norm
                other = other * load(rest[0], weight + partner) * norm
            c, s = load(angles, d % half), load(angles, d % half + half)
            z = own * c + (d < half).where(other * f32(-1), other) * s
            as_key = z.cast(F16)
            stores.append(at(rotated, e).store(is_key.where(as_key.cast(F32), z * f32(dim**-0.5 * _LOG2_E))))
            mine = is_key & keeps & (e < elements)
            cached.append(at(keys, h.key_index(kv, position, d), mine).store(as_key))
        new_value = load(value_rows, value_row + kv * dim + column).cast(F16)
        cached.append(
            at(values, h.value_index(kv, position, column), keeps & (thread < dim)).store(new_value)
        )
        rotated = rotated.after(UOp.group(*stores, *first_loads))
        next_keys, next_values = next_keys.after(rotated), next_values.after(rotated)

        # scores: a thread takes a token and one of `cuts` runs of dimensions
        tile = UOp.range((count + (tile_tokens - 1)) // tile_tokens, 0, AxisType.LOOP)
        queries = [[load(rotated, g * dim + cut * run + j) for j in range(run)] for g in range(group + 1)]
        loaded = next_keys.after(tile)
        key = [load(loaded, j).cast(F32) for j in range(run)]
        stride = split.room + 4  # the new token's scores come last
        scores = shared(cuts * group * stride, slot=2)
        at_cut = [(cut * group + g) * stride for g in range(group)]
        token = tile * tile_tokens + lane
        now = UOp.group(*(at(scores, at_cut[g] + token).store(_dot(key, queries[g])) for g in range(group)))
        then = [at(next_keys.after(now), j).store(x.cast(kept)) for j, x in enumerate(key_tile(tile + 1))]
        news = [
            at(scores, at_cut[g] + split.room, lane.eq(0)).store(_dot(queries[-1], queries[g]))
            for g in range(group)
        ]
        scores = scores.after(UOp.group(UOp.group(now, *then).end(tile), *news))

        def score(g: int, token: UOp | int) -> UOp:
            return tree([load(scores, (c * group + g) * stride + token) for c in range(cuts)])

        # the largest of each head, in two steps
        tiles = (count + (n_threads - 1)) // n_threads
        again = UOp.range(tiles, 1, AxisType.REDUCE)
        warp_lane = thread % 32
        largest = shared(group * 32, slot=3)
        stores = []
        for g in range(group):
            tokens = [again * n_threads + j * 32 + warp_lane for j in range(n_threads // 32)]
            seen = maximum([(t < count).where(score(g, t), f32(LOWEST)) for t in tokens])
            stores.append(at(largest, g * 32 + warp_lane, thread < 32).store(seen.reduce(again, arg=Ops.MAX)))
        largest = largest.after(UOp.group(*stores))
        new_scores = [is_first.where(score(g, split.room), f32(LOWEST)) for g in range(group)]
        top = [
            maximum([new_scores[g], *(load(largest, g * 32 + j) for j in range(32))]) for g in range(group)
        ]

        # weights of tokens
        third = UOp.range(tiles, 2, AxisType.LOOP)
        token = third * n_threads + thread
        stores = []
        for g in range(group):
            weight = (token < count).where((score(g, token) - top[g]).exp2(), f32(0))
            stores.append(
                at(scores, g * stride + token).store(weight)
            )  # in the place of the first cut's scores
        weights = scores.after(UOp.group(*stores).end(third))

        # their sums of values: a thread takes a dimension and every `slices`-th quad of tokens
        step = UOp.range((count + (step_quads * 4 - 1)) // (step_quads * 4), 3, AxisType.LOOP)
        loaded = next_values.after(step, weights)
        value = [load(loaded, j).cast(F32) for j in range(ahead * 4)]
        sums = registers(group * 2, 2)
        sums = sums.after(UOp.group(*(at(sums, i).store(f32(0)) for i in range(group * 2))))
        so_far = sums.after(step)
        stores = []
        for g in range(group):
            w = [
                load(weights, g * stride + (step * step_quads + j * slices + slice_) * 4 + i)
                for j in range(ahead)
                for i in range(4)
            ]
            stores.append(
                at(sums, 2 * g).store(
                    chain([load(so_far, 2 * g), *(a * b for a, b in zip(w, value, strict=True))])
                )
            )
            stores.append(at(sums, 2 * g + 1).store(chain([load(so_far, 2 * g + 1), *w])))
        now = UOp.group(*stores)
        then = [at(next_values.after(now), j).store(x.cast(kept)) for j, x in enumerate(value_step(step + 1))]
        sums = sums.after(UOp.group(now, *then).end(step))
        width = dim + 1
        partial = shared(slices * group * width, slot=5)
        own_slice = None if slices * dim == n_threads else thread < slices * dim
        stores = []
        for g in range(group):
            place = (slice_ * group + g) * width
            is_total = column.eq(0) if own_slice is None else column.eq(0) & own_slice
            stores.append(at(partial, place + column, own_slice).store(load(sums, 2 * g)))
            stores.append(at(partial, place + dim, is_total).store(load(sums, 2 * g + 1)))
        partial = partial.after(UOp.group(*stores))

        # put together, with the new token
        for i in range(-(-group * dim // n_threads)):
            e = thread + i * n_threads
            inside = None if (i + 1) * n_threads <= group * dim else e < group * dim
            head = e // dim if group > 1 else UOp.const(0)
            new_score, head_top = _pick(new_scores, head), _pick(top, head)
            new_weight = is_first.where((new_score - head_top).exp2(), f32(0))
            base = head * width
            total = tree([load(partial, base + k * group * width + e % dim, inside) for k in range(slices)])
            weight = tree([load(partial, base + k * group * width + dim, inside) for k in range(slices)])
            # a thread's elements are all of its column where a block's width is a multiple of dim
            mine = (
                new_value
                if n_threads % dim == 0
                else load(value_rows, value_row + kv * dim + e % dim).cast(F16)
            )
            total, weight = total + new_weight * mine.cast(F32), weight + new_weight
            element = block * (group * dim) + e
            if split.splits == 1:
                scaled = total / weight * load(rest[-1], element % UNIT, inside)
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
        name = f"attention_{h.query}_{h.kv}_{dim}_{split.limit}_{split.splits}_{group}_{n_threads}"
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
