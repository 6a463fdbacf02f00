"""Attention of one new token on tensor cores, where there are some; otherwise as `engine.kernels.gpu.attention`.

Tensor cores multiply tiles of 16 rows. A block's query heads, eight at most, are the upper eight rows; what rounding
them to half precision has left are the lower eight, and so with the tokens' weights, so that sums are as good as
with float32. A warp takes sixteen tokens at a time. Which of them a thread's scores are for is chosen such that the
same thread needs their weights as an operand of the product with the values (as in `engine.kernels.gpu.prefill`), so
scores never leave their thread; warps exchange their largest score and, in the end, their sums.

The cache is read once, straight into registers, a round ahead of its use, the first ahead of everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.gpu.attention import SLACK, Heads, NewToken
from engine.kernels.gpu.matmul import wmma
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
_STEP = 16  # tokens a warp takes at a time
MOST = 8  # query heads to a block
_PART = 512  # tokens of a part at most
_SUMS_BYTES = 16 << 10  # of a block's shared memory, for sums


@dataclass(frozen=True)
class FlashSplit:
    """How a step's attention is cut: for up to `limit` tokens, `splits` parts; to a block `group` heads, one of
    `across` runs of the values' dimensions, and `warps` warps, each with `steps` times sixteen tokens under way."""

    limit: int
    splits: int
    group: int
    warps: int
    steps: int = 1
    across: int = 1

    @property
    def rounds(self) -> int:
        """How often a warp may have to go over its `steps`."""
        part = -(-self.limit // (self.splits * 4)) * 4
        return -(-part // (self.warps * self.steps * _STEP))

    def shared_bytes(self, dim: int) -> int:
        """Of a block's shared memory, but for a few hundred: scores, sums of warps, the new token and maxima."""
        scores = self.rounds * self.steps * self.warps * 512 if self.rounds > 1 else 0
        token = ((self.group + 1) * dim + self.warps * 32) * 8
        return scores + self.warps * self.group * (dim // self.across) * 4 + token + self.warps * 256


def flash_split(heads: Heads, limit: int, short: int, multiprocessors: int) -> FlashSplit:
    """For up to `short` tokens a block takes all of them, and blocks share the values' dimensions (measured: all of
    the keys read four times cost less than putting parts together). For more there are two blocks or more to each
    multiprocessor, of no more tokens than have room in shared memory."""
    most = min(MOST, heads.shared_by, 1024 // heads.dim)
    group = next(n for n in range(most, 0, -1) if heads.shared_by % n == 0)
    warps = max(4, -(-heads.dim // 32))
    narrow = [n for n in (4, 2, 1) if heads.dim % (8 * n) == 0]
    if limit <= short:
        return FlashSplit(limit, 1, group, max(8, warps), 2, narrow[0])
    across = narrow[-1] if warps * group * heads.dim * 4 <= _SUMS_BYTES else narrow[0]
    splits = max(2, 2 * multiprocessors // (heads.query // group), -(-limit // _PART))
    return FlashSplit(limit, splits, group, warps, 1, across)


@functools.cache
def flash_attention(heads: Heads, split: FlashSplit) -> Kernel:
    """The kernel body. Buffers: as of `engine.kernels.gpu.attention.attention`."""
    h, group, warps, n_threads = heads, split.group, split.warps, split.warps * 32
    dim, eighths, width = h.dim, h.dim // 8, h.dim // split.across
    chunks, lists = dim // 16, warps * 4
    assert group <= MOST and h.shared_by % group == 0 and dim % 16 == 0 and width % 8 == 0
    assert max(width, UNIT, (group + 1) * dim // 16) <= n_threads and split.shared_bytes(dim) < 46 << 10

    def kernel(*buffers: UOp) -> UOp:
        n_outs = 1 if split.splits == 1 else 2
        outs, (keys, values, rows, angles, state, *rest) = buffers[:n_outs], buffers[n_outs:]
        norms = rest.pop(0) if h.norm_eps is not None else None
        lane, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        thread, g, t = warp * 32 + lane, lane // 4, lane % 4
        block = UOp.special(h.query // group, "gidx0")
        part = UOp.special(split.splits, "gidx1") if split.splits > 1 else UOp.const(0)
        run = UOp.special(split.across, "gidx2") if split.across > 1 else UOp.const(0)
        blocks_of_kv = h.shared_by // group
        kv = block // blocks_of_kv
        position = load_index(state, 1, h.length - SLACK)
        start, count = UOp.const(0), position
        if split.splits > 1:
            each = (position + split.splits * 4 - 1) // (split.splits * 4) * 4
            start = part * each
            count = (position - start).maximum(0).minimum(each)
        is_first = part.eq(0)
        keeps = is_first & run.eq(0) & (block % blocks_of_kv).eq(0)

        def steps_of(round_: UOp | int) -> list[UOp]:
            return [(round_ * split.steps + s) * warps + warp for s in range(split.steps)]

        def key_loads(round_: UOp | int) -> list[UOp]:
            """Of each step twice eight keys: a thread's four scores are of neighbours."""
            loads = []
            for step in steps_of(round_):
                for side in (0, 1):
                    key = step * _STEP + g // 2 * 4 + g % 2 + 2 * side
                    first = ((kv * (dim // 4) + t) * h.length + start + key) * 4
                    for c in range(chunks):
                        place = first + c * (16 * h.length)
                        loads += [load(keys, place + i, key < count) for i in range(4)]
            return loads

        def value_loads(round_: UOp | int) -> list[UOp]:
            loads = []
            for step in steps_of(round_):
                quad = step * 4 + t
                first = ((kv * (h.length // 4) + start // 4 + quad) * dim + run * width + g) * 4
                for j in range(width // 8):
                    loads += [load(values, first + j * 32 + i, quad * 4 < count) for i in range(4)]
            return loads

        def under_way(loads: Callable[[UOp | int], list[UOp]], slot: int) -> tuple[UOp, list[UOp]]:
            first = loads(0)
            kept = registers(len(first), slot, half_registers())
            return kept, [at(kept, i).store(x.cast(kept.dtype)) for i, x in enumerate(first)]

        next_keys, key_stores = under_way(key_loads, 0)
        next_values, value_stores = under_way(value_loads, 1)
        first_loads = [*key_stores, *value_stores]

        # the new token; what is wanted of it in the end is read now
        new = NewToken(h, thread, n_threads, kv, block * group, group, position)
        half = half_registers()
        rotated, upper, lower = shared(new.size, 1), shared(new.size, 10, half), shared(new.size, 11, half)
        turned, kept_key = new.turned(rows, angles, norms, first_loads)
        stores = [at(rotated, e).store(x) for e, x in turned]
        for e, x in turned:
            u, v = in_two(x)
            stores += [at(upper, e).store(u.cast(half)), at(lower, e).store(v.cast(half))]
        cached = [at(keys, place, ok & keeps).store(x) for place, ok, x in kept_key]
        new_values, own_column = shared(width, slot=8), thread < width
        column = run * width + thread
        new_value = load(rows, (h.query + h.kv + kv) * dim + column, own_column).cast(F16)
        stores.append(at(new_values, thread, own_column).store(new_value.cast(F32)))
        cached.append(
            at(
                values,
                h.value_index(kv, position, column),
                is_first & own_column & (block % blocks_of_kv).eq(0),
            ).store(new_value)
        )
        prescale = shared(UNIT, slot=9)
        if split.splits == 1:
            stores.append(at(prescale, thread, thread < UNIT).store(load(rest[-1], thread, thread < UNIT)))
        ready = UOp.group(*stores, *first_loads)
        rotated, upper, lower, new_values, prescale = (
            x.after(ready) for x in (rotated, upper, lower, new_values, prescale)
        )
        next_keys, next_values = next_keys.after(rotated), next_values.after(rotated)

        # scores: row g of both halves of the tiles is head g
        head = g.minimum(group - 1)
        queries = []
        for c in range(chunks):
            u, v = (
                [load(q, head * dim + c * 16 + t * 4 + i).cast(F16) for i in range(4)] for q in (upper, lower)
            )
            queries.append(operand(u, v))
        fresh, fresh_store = new.own_scores(rotated, slot=6)
        many = split.rounds > 1
        rounds = (count + (n_threads // 32 * split.steps * _STEP - 1)) // (warps * split.steps * _STEP)
        loop = UOp.range(rounds, 0, AxisType.LOOP) if many else UOp.const(0)
        best = registers(1, 2)
        best = best.after(at(best, 0).store(f32(LOWEST)))
        loaded = next_keys.after(loop) if many else next_keys
        scores, i = [], 0
        for step in steps_of(loop):
            for side in (0, 1):
                acc = [f32(0)] * 4
                for c in range(chunks):
                    acc = wmma(queries[c], [load(loaded, i + k).cast(F16) for k in range(4)], acc)
                    i += 4
                token = step * _STEP + t * 4 + 2 * side
                scores += [(token + k < count).where(acc[k] + acc[2 + k], f32(LOWEST)) for k in (0, 1)]
        own_scores = shared(split.rounds * len(scores) * n_threads, slot=2)
        place = loop * (len(scores) * n_threads) + thread * 4

        def score_place(k: int) -> UOp:
            return place + k // 4 * (4 * n_threads) + k % 4

        so_far = load(best.after(loop), 0) if many else load(best, 0)
        stores = [at(best, 0).store(maximum([so_far, *scores]))]
        if many:
            stores += [at(own_scores, score_place(k)).store(x) for k, x in enumerate(scores)]
            now = UOp.group(*stores)
            stores = [
                at(next_keys.after(now), k).store(x.cast(next_keys.dtype))
                for k, x in enumerate(key_loads(loop + 1))
            ]
            done = UOp.group(now, *stores).end(loop)
        else:
            done = stores[0]
        largest = shared(8 * lists, slot=3)
        store = at(largest, g * lists + warp * 4 + t).store(load(best.after(done), 0))
        all_stores = UOp.group(store, fresh_store)
        largest, fresh = largest.after(all_stores), fresh.after(all_stores)

        def new_score(head: UOp) -> UOp:
            return is_first.where(
                tree([load(fresh, head * eighths + k) for k in range(eighths)]), f32(LOWEST)
            )

        def top_of(head: UOp) -> UOp:
            return maximum([new_score(head), *(load(largest, head * lists + k) for k in range(lists))])

        # weights of tokens, and their sums of values
        top = top_of(head)
        n_acc = width // 2
        acc_ = registers(n_acc + 1, 3)
        acc_ = acc_.after(UOp.group(*(at(acc_, k).store(f32(0)) for k in range(n_acc + 1))))
        if many:
            loop = UOp.range(rounds, 1, AxisType.LOOP)
            place = loop * (len(scores) * n_threads) + thread * 4
            mine = own_scores.after(largest)
            scores = [load(mine, score_place(k)) for k in range(len(scores))]
        sums = [load(acc_.after(loop) if many else acc_, k) for k in range(n_acc + 1)]
        loaded, i = next_values.after(loop, largest) if many else next_values.after(largest), 0
        for s in range(split.steps):
            weights = [(x > f32(LOWEST)).where((x - top).exp2(), f32(0)) for x in scores[4 * s : 4 * s + 4]]
            tile = operand(*zip(*map(in_two, weights), strict=True))
            for j in range(width // 8):
                sums[j * 4 : j * 4 + 4] = wmma(
                    tile, [load(loaded, i + k).cast(F16) for k in range(4)], sums[j * 4 : j * 4 + 4]
                )
                i += 4
            sums[-1] = chain([sums[-1], *weights])
        now = UOp.group(*(at(acc_, k).store(x) for k, x in enumerate(sums)))
        if many:
            stores = [
                at(next_values.after(now), k).store(x.cast(next_values.dtype))
                for k, x in enumerate(value_loads(loop + 1))
            ]
            now = UOp.group(now, *stores).end(loop)
        acc_ = acc_.after(now)
        partial, totals = shared(warps * group * width, slot=5), shared(8 * lists, slot=7)
        stores = [at(totals, g * lists + warp * 4 + t).store(load(acc_, n_acc))]
        for j in range(width // 8):
            for k in (0, 1):
                total = load(acc_, j * 4 + k) + load(acc_, j * 4 + 2 + k)
                spot = (warp * group + g) * width + j * 8 + t * 2 + k
                stores.append(at(partial, spot, g < group).store(total))
        all_stores = UOp.group(*stores, *cached)  # before the loop: C would not see what is declared in it
        partial, totals = partial.after(all_stores), totals.after(all_stores)

        # put together, with the new token, by as many threads as there are elements
        elements = group * width
        loop = UOp.range((elements + (n_threads - 1) - thread) // n_threads, 2, AxisType.LOOP)
        e = (loop * n_threads + thread).minimum(elements - 1)  # where threads without one cannot stay away
        head, d = (e // width).minimum(group - 1), e % width
        head_top = top_of(head)
        new_weight = is_first.where((new_score(head) - head_top).exp2(), f32(0))
        total = tree([load(partial, e + k * elements) for k in range(warps)])
        weight = tree([load(totals, head * lists + k) for k in range(lists)]) + new_weight
        total = total + new_weight * load(new_values, d)
        element = (block * group + head) * dim + run * width + d
        if split.splits == 1:
            scaled = total / weight * load(prescale, element % UNIT)
            results = [at(outs[0], permuted(element, h.query * dim)).store(scaled)]
        else:
            place, one = (part * h.query + block * group + head) * 2, d.eq(0) & run.eq(0)
            results = [
                at(outs[0], part * (h.query * dim) + element).store(total),
                at(outs[1], place, one).store(head_top),
                at(outs[1], place + 1, one).store(weight),
            ]
        shape = f"{split.limit}_{split.splits}_{group}_{warps}_{split.steps}_{split.across}"
        return finish(f"attention_flash_{h.query}_{h.kv}_{dim}_{shape}", [UOp.group(*results).end(loop)])

    return kernel


def in_two(value: UOp) -> tuple[UOp, UOp]:
    """What a float32 rounds to as a half, and what is left of it."""
    upper = value.cast(F16)
    return upper, (value - upper.cast(F32)).cast(F16)


def operand(upper: Sequence[UOp], lower: Sequence[UOp]) -> list[UOp]:
    """A left operand of which a thread has four elements of row g and of row g + 8."""
    return [*upper[:2], *lower[:2], *upper[2:], *lower[2:]]
