"""Attention of one new token in decode without tensor cores, for older GPUs and for head sizes that are no multiple of
16.

Keys and values are read once, and their range is split over blocks.

A block has `group` query heads that share keys, and one of `splits` equal parts of the cached tokens. It rotates (and
norms, if the model does) its queries and the new key itself, so that the QKV product only stores its rows. The block of
the first split also attends to the new token and stores it in the cache.

Decode computes little and waits for memory, so loads from the cache are issued one step ahead of their use, and the
first ones before everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.gpu.cache_tiles import four_values, load_halves
from engine.kernels.gpu.decode_block import DecodeBlock, block_buffers
from engine.kernels.gpu.few_columns import column_index
from engine.kernels.gpu.kv_cache import TILE, Heads
from engine.kernels.gpu.matmul import as_half
from engine.kernels.gpu.uops import (
    F16,
    F32,
    LOG2_E,
    LOWEST,
    after_store,
    chain,
    f32,
    finish,
    half_registers,
    load,
    load_run,
    maximum,
    registers,
    shared,
    sigmoid,
    store,
    store_run,
    tree,
    zeroed_registers,
)
from engine.kernels.gpu.weight_layout import UNIT, permuted
from engine.kernels.kernel import Kernel

_MIN_PART = 64  # tokens of a part of a window
_MAX_SCORES_BYTES = 36 << 10  # of a block's shared memory


@dataclass(frozen=True)
class Split:
    """How the attention of a decode step is divided: up to `limit` cached tokens in `splits` parts; a block has `group`
    heads and `threads` threads; `cuts` threads share the elements of a key; a thread loads `ahead` groups of four
    values ahead of their use."""

    limit: int
    splits: int
    group: int
    threads: int
    cuts: int
    ahead: int

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of a part, in whole tiles of one token for each thread."""
        part = -(-self.limit // (self.splits * TILE)) * TILE
        return -(-part // self.threads) * self.threads


def split_for(heads: Heads, limit: int, short: int, multiprocessors: int) -> Split:
    """The division for up to `limit` tokens. Up to `short` tokens, a block takes all of them; for more, there is one
    block for each multiprocessor."""
    threads, limit = max(256, -(-heads.dim // 64) * 64), heads.cached(limit)
    if limit <= short:
        return Split(limit, 1, 1, threads, 4, 4)
    group = 2 if heads.shared_by % 2 == 0 else 1
    wanted = multiprocessors // heads.kv
    if heads.window:
        wanted = min(wanted, -(-limit // _MIN_PART))
    splits = max(2, wanted, -(-limit * group * 4 * 4 // _MAX_SCORES_BYTES))
    return Split(limit, splits, group, threads, 4, 4)


@functools.cache
def attention(heads: Heads, split: Split, sinks: bool = False, wide: bool = False, tokens: int = 0) -> Kernel:
    """Attention of one new token without tensor cores, or of those of `tokens` sequences. Buffers: see
    `DecodeBlock`."""
    h, n_threads, group = heads, split.threads, split.group
    dim = h.dim
    cuts, slices = split.cuts, 1 << ((n_threads // dim).bit_length() - 1)
    run, tile_tokens = dim // cuts, n_threads // cuts
    ahead = min(split.ahead, n_threads // (slices * 4))  # so that all tokens of a step have weights
    step_quads = slices * ahead
    assert (
        not h.kv_format.is_quantized
        and n_threads >= dim
        and h.shared_by % group == 0
        and n_threads % (32 * cuts) == 0
        and dim % 8 == 0
    )

    def kernel(**buffers: UOp | list[UOp]) -> UOp:
        thread = UOp.special(n_threads, "lidx0")
        block = DecodeBlock(h, split.splits, group, thread, n_threads, buffers, wide, tokens)
        kv, start, count, is_first = block.kv, block.start, block.count, block.is_first_part

        # the first loads from the cache
        lane, cut = thread % tile_tokens, thread // tile_tokens
        column, slice_ = thread % dim, thread // dim
        if slices * dim < n_threads:
            slice_ = (slice_ < slices).where(slice_, slices - 1)

        def key_tile(tile: UOp | int) -> list[UOp]:
            token = tile * tile_tokens + lane
            places = (cut * (run // 4) + j for j in range(run // 4))
            at = block.cache, 0, kv, start + token
            return [x for quad in places for x in load_halves(h, *at, quad, token < count, block.pages)]

        def value_step(step: UOp | int) -> list[UOp]:
            quads = [step * step_quads + j * slices + slice_ for j in range(ahead)]
            return [
                x
                for quad in quads
                for x in four_values(
                    h, block.cache, kv, start + quad * 4, column, quad * 4 < count, block.pages
                )
            ]

        half = half_registers()
        next_keys, next_values = registers(run, 0, half), registers(ahead * 4, 1, half)
        first_loads = [*store_run(next_keys, 0, key_tile(0)), *store_run(next_values, 0, value_step(0))]

        new_rows = shared(block.n_rotated, slot=1)
        elements = block.rotate(first_loads)
        new_values, stores = shared(dim, slot=8), [store(new_rows, e, x) for e, x in elements]
        if block.has_new:
            stores += block.new_value(new_values, 0, dim)
        ready = UOp.group(*stores, *first_loads)
        new_rows, new_values = new_rows.after(ready), new_values.after(ready)
        results = block.store_token(new_rows, new_values)
        next_keys, next_values = next_keys.after(new_rows), next_values.after(new_rows)

        # Scores: a thread has a token and one of `cuts` runs of dimensions.
        tile = UOp.range((count + (tile_tokens - 1)) // tile_tokens, 0, AxisType.LOOP)
        query_rows, loaded = new_rows.after(tile), next_keys.after(tile)
        key = [x.cast(F32) for x in load_run(loaded, 0, run)]
        stride = split.max_tokens
        scores = shared(cuts * group * stride, slot=2)
        stores = []
        for g in range(group):
            query = load_run(query_rows, g * dim + cut * run, run)
            index = (cut * group + g) * stride + tile * tile_tokens + lane
            stores.append(store(scores, index, _dot(key, query)))
        used = UOp.group(*stores)
        prefetch = store_run(next_keys.after(used), 0, key_tile(tile + 1))
        partial_scores, own_scores = shared(1, slot=6), list[UOp]()
        if block.has_new:
            partial_scores, own_scores = block.partial_scores(new_rows, slot=6)
        all_stores = UOp.group(UOp.group(used, *prefetch).end(tile), *own_scores)
        scores, partial_scores = scores.after(all_stores), partial_scores.after(all_stores)

        def score(g: int | UOp, token: UOp) -> UOp:
            return tree([load(scores, (g + c * group) * stride + token) for c in range(cuts)])

        # The largest score of each head: a warp reduces a head, then every thread the results of the warp's lanes.
        warp, warp_lane = thread // 32, thread % 32
        tiles = (count + (n_threads - 1)) // n_threads
        has_head = warp < group

        def for_lane(loop: UOp, value: Callable[[UOp], UOp]) -> list[UOp]:
            """The values of a lane's tokens in a step of the loop."""
            return [value(loop * n_threads + j * 32 + warp_lane) for j in range(n_threads // 32)]

        loop = UOp.range(has_head.where(tiles, 0), 1, AxisType.REDUCE)
        warp_head = warp.minimum(group - 1)
        lane_scores = for_lane(loop, lambda t: block.sees(t).where(score(warp_head, t), f32(LOWEST)))
        lane_max = maximum(lane_scores).reduce(loop, arg=Ops.MAX)
        largest = after_store(shared(group * 32, slot=3), thread, lane_max, has_head)
        n_parts = block.n_parts
        new_scores = [f32(LOWEST)] * group
        if block.has_new:
            new_scores = [tree(load_run(partial_scores, g * n_parts, n_parts)) for g in range(group)]
            new_scores = [is_first.where(score, f32(LOWEST)) for score in new_scores]
        top = [maximum([new_scores[g], *load_run(largest, g * 32, 32)]) for g in range(group)]

        # The weights of tokens replace the scores of the first cut.
        loop = UOp.range(tiles, 2, AxisType.LOOP)
        token = loop * n_threads + thread
        token_weights = [(score(g, token) - top[g]).exp2() for g in range(group)]
        stores = store_run(
            scores, token, [block.sees(token).where(w, f32(0)) for w in token_weights], stride=stride
        )
        weights = scores.after(UOp.group(*stores).end(loop))
        loop = UOp.range(has_head.where(tiles, 0), 3, AxisType.REDUCE)
        sum_ = tree(for_lane(loop, lambda t: load(weights, warp_head * stride + t)))
        totals = shared(group * 32, slot=7)
        total_store = store(totals, thread, sum_.reduce(loop, arg=Ops.ADD), has_head)

        # Weighted sums of values: a thread has a dimension and every `slices`-th group of four tokens.
        step = UOp.range((count + (step_quads * 4 - 1)) // (step_quads * 4), 4, AxisType.LOOP)
        loaded = next_values.after(step, weights)
        value = [x.cast(F32) for x in load_run(loaded, 0, ahead * 4)]
        sums = zeroed_registers(group, 2)
        so_far = sums.after(step)
        stores = []
        for g in range(group):
            firsts = (g * stride + (step * step_quads + j * slices + slice_) * 4 for j in range(ahead))
            w = [x for first in firsts for x in load_run(weights, first, 4)]
            products = [a * b for a, b in zip(w, value, strict=True)]
            stores.append(store(sums, g, chain([load(so_far, g), *products])))
        used = UOp.group(*stores)
        prefetch = store_run(next_values.after(used), 0, value_step(step + 1))
        sums = sums.after(UOp.group(used, *prefetch).end(step))
        partial = shared(slices * group * dim, slot=5)
        in_slice = None if slices * dim == n_threads else thread < slices * dim
        stores = [
            store(partial, (slice_ * group + g) * dim + column, load(sums, g), in_slice) for g in range(group)
        ]
        all_stores = UOp.group(total_store, *stores)
        partial, totals = partial.after(all_stores), totals.after(all_stores)
        weight_of = [tree(load_run(totals, g * 32, 32)) for g in range(group)]

        # The result, with the new token.
        for i in range(-(-group * dim // n_threads)):
            e = thread + i * n_threads
            inside = None if (i + 1) * n_threads <= group * dim else e < group * dim
            head = e // dim if group > 1 else UOp.const(0)
            new_score, head_top = _pick(new_scores, head), _pick(top, head)
            new_weight = is_first.where((new_score - head_top).exp2(), f32(0))
            total = tree([load(partial, k * group * dim + e, inside) for k in range(slices)])
            weight = _pick(weight_of, head)
            if block.has_new:
                total = total + new_weight * load(new_values, e % dim).cast(F16).cast(F32)
            sums_of_head = total, weight + new_weight, head_top
            element = block.number * (group * dim) + e
            results += block.store_result(
                element, head, (e % dim).eq(0), sums_of_head, block.prescale, inside
            )
        shape = f"{split.limit}_{split.splits}_{group}_{n_threads}_{cuts}_{ahead}"
        name = f"attention_{h.name}_{shape}{'_sinks' * sinks}{'_wide' * wide}"
        return finish(name + f"_{tokens}" * (tokens > 0), results)

    return Kernel(kernel, *block_buffers(h, split.splits, sinks, tokens))


def _dot(a: Sequence[UOp], b: Sequence[UOp]) -> UOp:
    products = [x * y for x, y in zip(a, b, strict=True)]
    return tree([chain(products[k::4]) for k in range(4)])


def _pick(values: Sequence[UOp], index: UOp) -> UOp:
    picked = values[0]
    for i, value in enumerate(values[1:], 1):
        picked = index.eq(i).where(value, picked)
    return picked


@functools.cache
def combine(heads: Heads, splits: int, has_sinks: bool = False, tokens: int = 0) -> Kernel:
    """Combines the splits of decode attention. Buffers: out, float32, permuted and prescaled; sums and tops (see
    `DecodeBlock`); prescale, the output's, float32 (UNIT,), if the step is not of several `tokens`; sinks, float32
    (query,), if there are any; of gated heads, rows, those of the QKV product."""
    n, several = heads.query * heads.dim, max(tokens, 1)

    def kernel(
        out: UOp, sums: UOp, tops: UOp, prescale: UOp | None, sinks: UOp | None, rows: UOp | None
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
            value = value * sigmoid(load(rows, token * heads.rows + element))
        name = f"combine_{heads.query}_{heads.dim}_{splits}{'_sinks' * has_sinks}"
        if prescale is None:
            return finish(f"{name}_{tokens}", [store(out, column_index(token, element, n), as_half(value))])
        stores = [store(out, permuted(element, n), value * load(prescale, element % UNIT))]
        return finish(name, stores)

    inputs = "sums", "tops", not tokens and "prescale", has_sinks and "sinks", heads.gated and "rows"
    return Kernel(kernel, ("out",), inputs)
