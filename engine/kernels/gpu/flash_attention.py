"""Attention of one new token in decode, on tensor cores.

Tensor cores multiply tiles of 16 rows. A block's query heads, at most eight, rounded to half precision, are the upper
eight rows; the rounding errors are the lower eight rows. The tokens' weights are split in the same way, so that the
sums are as accurate as with float32. A warp works on sixteen tokens at a time. The tokens are assigned to threads such
that the thread that computes a token's score needs its weight as an operand of the product with the values (as in
`engine.kernels.gpu.prefill_attention`), so scores stay in their thread. Warps exchange only their largest scores and,
at the end, their sums.

The cache is read once, straight to registers. Loads are issued a round ahead of their use, and the first ones before
everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.decode_block import DecodeBlock
from engine.kernels.gpu.kv_cache import Heads
from engine.kernels.gpu.matmul import wmma
from engine.kernels.gpu.uops import (
    F16,
    F32,
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
    store,
    store_run,
    tree,
    zeroed_registers,
)
from engine.kernels.gpu.weight_layout import UNIT

_STEP = 16  # tokens that a warp works on at a time
_MAX_HEADS = 8  # query heads in a block
_MIN_PART, _MAX_PART = 64, 512  # tokens of a part: at least, for a window; at most
_MAX_SUMS_BYTES = 16 << 10  # of a block's shared memory, for the sums of all dimensions
_MAX_SHARED_BYTES = 46 << 10  # of a block


@dataclass(frozen=True)
class FlashSplit:
    """How the attention of a decode step is divided: up to `limit` cached tokens in `splits` parts; a block has `group`
    heads, one of `across` runs of the values' dimensions, and `warps` warps, each with `steps` times sixteen tokens."""

    limit: int
    splits: int
    group: int
    warps: int
    steps: int = 1
    across: int = 1

    @property
    def rounds(self) -> int:
        """The largest number of rounds of `steps` that a warp needs for its part."""
        part = -(-self.limit // (self.splits * 4)) * 4
        return -(-part // (self.warps * self.steps * _STEP))

    def shared_bytes(self, dim: int) -> int:
        """Shared memory of a block, except a few hundred bytes: scores, sums of warps, the new token and maxima."""
        scores = self.rounds * self.steps * self.warps * 512 if self.rounds > 1 else 0
        token = ((self.group + 1) * dim + self.warps * 32) * 8
        return scores + self.warps * self.group * (dim // self.across) * 4 + token + self.warps * 256


def flash_split(heads: Heads, limit: int, short: int, multiprocessors: int) -> FlashSplit:
    """The division for up to `limit` tokens. Up to `short` tokens, a block reads all keys, and blocks share the values'
    dimensions (measured: reading all keys four times costs less than combining splits). For more, there are at least
    two blocks for each multiprocessor, with as many tokens as fit shared memory."""
    limit = heads.cached(limit)
    group, warps, across, most_across = _blocks(heads)
    if limit <= short:
        return FlashSplit(limit, 1, group, max(8, warps), 2, most_across)
    splits = max(2, 2 * multiprocessors // (heads.query // group), -(-limit // _MAX_PART))
    split = FlashSplit(limit, splits, group, warps, 1, across)
    if heads.window:  # The few tokens by which `limit` exceeds it are to cost no round.
        fewer = min(splits, max(2, -(-limit // _MIN_PART)))
        split = min((replace(split, splits=n) for n in (fewer, fewer + 1)), key=lambda s: s.rounds)
    return split


def rows_split(heads: Heads, limit: int, tokens: int, multiprocessors: int) -> FlashSplit:
    """The division for `tokens` tokens of different sequences with up to `limit` tokens each. All of them together are
    to give two blocks for each multiprocessor."""
    limit = heads.cached(limit)
    group, warps, across, _ = _blocks(heads)
    wanted = 2 * multiprocessors // (tokens * (heads.query // group))
    splits = max(1, min(wanted, -(-limit // _MIN_PART)), -(-limit // _MAX_PART))
    return FlashSplit(limit, splits, group, warps, 1, across)


def _blocks(heads: Heads) -> tuple[int, int, int, int]:
    """The heads and the warps of a block, the blocks that share the values' dimensions, and the most that may."""
    max_group = min(_MAX_HEADS, heads.shared_by, 1024 // heads.dim)
    group = next(n for n in range(max_group, 0, -1) if heads.shared_by % n == 0)
    warps = max(4, -(-heads.dim // 32))
    runs = [n for n in (4, 2, 1) if heads.dim % (8 * n) == 0]
    return group, warps, runs[-1] if warps * group * heads.dim * 4 <= _MAX_SUMS_BYTES else runs[0], runs[0]


@functools.cache
def flash_attention(
    heads: Heads, split: FlashSplit, sinks: bool = False, wide: bool = False, tokens: int = 0
) -> Kernel:
    """Attention of one new token on tensor cores, or of those of `tokens` sequences. Buffers: see `DecodeBlock`."""
    h, group, warps, n_threads = heads, split.group, split.warps, split.warps * 32
    dim, eighths, width = h.dim, h.dim // 8, h.dim // split.across
    chunks, lists = dim // 16, warps * 4
    assert group <= _MAX_HEADS and h.shared_by % group == 0 and dim % 16 == 0 and width % 8 == 0
    assert (
        max(width, UNIT, (group + 1) * dim // 16) <= n_threads and split.shared_bytes(dim) < _MAX_SHARED_BYTES
    )

    def kernel(*buffers: UOp) -> UOp:
        lane, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        thread, g, t = warp * 32 + lane, lane // 4, lane % 4
        block = DecodeBlock(h, split.splits, group, thread, n_threads, buffers, sinks, wide, tokens)
        run = UOp.special(split.across, "gidx2") if split.across > 1 else UOp.const(0)
        kv, start, count, is_first = block.kv, block.start, block.count, block.is_first_part

        def steps_of(round_: UOp | int) -> list[UOp]:
            return [(round_ * split.steps + s) * warps + warp for s in range(split.steps)]

        def key_loads(round_: UOp | int) -> list[UOp]:
            """For each step, eight keys twice: a thread's four scores belong to neighbouring tokens."""
            loads = []
            for step in steps_of(round_):
                for side in (0, 1):
                    key = step * _STEP + g // 2 * 4 + g % 2 + 2 * side
                    first = h.run(kv * (dim // 4) + t, start, key, pages=block.pages) * 4
                    for c in range(chunks):
                        index = first + c * (16 * h.slots)
                        loads += load_run(block.keys, index, 4, key < count)
            return loads

        def value_loads(round_: UOp | int) -> list[UOp]:
            loads = []
            for step in steps_of(round_):
                quad = step * 4 + t
                place = h.run(kv, start // 4, quad, size=4, pages=block.pages)
                first = (place * dim + run * width + g) * 4
                for j in range(width // 8):
                    loads += load_run(block.values, first + j * 32, 4, quad * 4 < count)
            return loads

        def prefetch(loads: Callable[[UOp | int], list[UOp]], slot: int) -> tuple[UOp, list[UOp]]:
            """Registers for the loads of a round, and the stores of round 0 to them."""
            first = loads(0)
            array = registers(len(first), slot, half_registers())
            return array, store_run(array, 0, first)

        next_keys, key_stores = prefetch(key_loads, 0)
        next_values, value_stores = prefetch(value_loads, 1)
        first_loads = [*key_stores, *value_stores]

        # The new token. The loads for the end of the kernel are issued here too.
        half, n = half_registers(), block.n_rotated
        new_rows, upper, lower = shared(n, 1), shared(n, 10, half), shared(n, 11, half)
        elements, key_elements = block.rotate(first_loads)
        stores = [store(new_rows, e, x) for e, x in elements]
        for e, x in elements:
            u, v = split_half(x)
            stores += [store(upper, e, u.cast(half)), store(lower, e, v.cast(half))]
        stores_key = block.stores_token & run.eq(0)
        cache_stores = [store(block.keys, index, x, ok & stores_key) for index, ok, x in key_elements]
        new_values, has_column = shared(width, slot=8), thread < width
        column = run * width + thread
        new_value = load(block.rows, block.value_row(column), has_column).cast(F16)
        stores.append(store(new_values, thread, new_value.cast(F32), has_column))
        value_index = block.value_place(column)
        cache_stores.append(store(block.values, value_index, new_value, block.stores_token & has_column))
        prescale = shared(UNIT, slot=9)
        if block.prescale is not None:
            stores.append(store(prescale, thread, load(block.prescale, thread, thread < UNIT), thread < UNIT))
        own_sinks, has_sink = shared(_MAX_HEADS, slot=12), thread < group
        if block.sinks is not None:
            sink = load(block.sinks, block.first_head + thread, has_sink)
            stores.append(store(own_sinks, thread, sink, has_sink))
        ready = UOp.group(*stores, *first_loads)
        new_rows, upper, lower, new_values, prescale = (
            x.after(ready) for x in (new_rows, upper, lower, new_values, prescale)
        )
        next_keys, next_values = next_keys.after(new_rows), next_values.after(new_rows)

        # Scores: rows g and g + 8 of a tile belong to head g.
        head = g.minimum(group - 1)
        queries = []
        for c in range(chunks):
            quads = (load_run(q, head * dim + c * 16 + t * 4, 4) for q in (upper, lower))
            queries.append(left_operand(*([x.cast(F16) for x in quad] for quad in quads)))
        partial_scores, new_store = block.partial_scores(new_rows, slot=6)
        many = split.rounds > 1
        rounds = (count + (n_threads // 32 * split.steps * _STEP - 1)) // (warps * split.steps * _STEP)
        loop = UOp.range(rounds, 0, AxisType.LOOP) if many else UOp.const(0)
        lane_max = after_store(registers(1, 2), 0, f32(LOWEST))
        loaded = next_keys.after(loop) if many else next_keys
        scores, i = [], 0
        for step in steps_of(loop):
            for side in (0, 1):
                acc = [f32(0)] * 4
                for c in range(chunks):
                    acc = wmma(queries[c], [x.cast(F16) for x in load_run(loaded, i, 4)], acc)
                    i += 4
                token = step * _STEP + t * 4 + 2 * side
                scores += [block.sees(token + k).where(acc[k] + acc[2 + k], f32(LOWEST)) for k in (0, 1)]
        saved_scores = shared(split.rounds * len(scores) * n_threads, slot=2)

        def score_index(round_: UOp, k: int) -> UOp:
            return round_ * (len(scores) * n_threads) + thread * 4 + k // 4 * (4 * n_threads) + k % 4

        so_far = load(lane_max.after(loop), 0) if many else load(lane_max, 0)
        stores = [store(lane_max, 0, maximum([so_far, *scores]))]
        if many:
            stores += [store(saved_scores, score_index(loop, k), x) for k, x in enumerate(scores)]
            used = UOp.group(*stores)
            done = UOp.group(used, *store_run(next_keys.after(used), 0, key_loads(loop + 1))).end(loop)
        else:
            done = stores[0]
        largest = shared(8 * lists, slot=3)
        max_store = store(largest, g * lists + warp * 4 + t, load(lane_max.after(done), 0))
        all_stores = UOp.group(max_store, new_store)
        largest, partial_scores = largest.after(all_stores), partial_scores.after(all_stores)

        def new_score(head: UOp) -> UOp:
            return is_first.where(tree(load_run(partial_scores, head * eighths, eighths)), f32(LOWEST))

        def top_of(head: UOp) -> UOp:
            return maximum([new_score(head), *load_run(largest, head * lists, lists)])

        # The weights of tokens, and the weighted sums of values.
        top = top_of(head)
        n_acc = width // 2
        sums_array = zeroed_registers(n_acc + 1, 3)  # the last is the sum of weights
        if many:
            loop = UOp.range(rounds, 1, AxisType.LOOP)
            scores = [load(saved_scores.after(largest), score_index(loop, k)) for k in range(len(scores))]
        sums = load_run(sums_array.after(loop) if many else sums_array, 0, n_acc + 1)
        loaded, i = next_values.after(loop, largest) if many else next_values.after(largest), 0
        for s in range(split.steps):
            weights = [(x > f32(LOWEST)).where((x - top).exp2(), f32(0)) for x in scores[4 * s : 4 * s + 4]]
            tile = left_operand(*zip(*map(split_half, weights), strict=True))
            for j in range(width // 8):
                right = [x.cast(F16) for x in load_run(loaded, i, 4)]
                sums[j * 4 : j * 4 + 4] = wmma(tile, right, sums[j * 4 : j * 4 + 4])
                i += 4
            sums[-1] = chain([sums[-1], *weights])
        used = UOp.group(*store_run(sums_array, 0, sums))
        if many:
            used = UOp.group(used, *store_run(next_values.after(used), 0, value_loads(loop + 1))).end(loop)
        sums_array = sums_array.after(used)
        partial, totals = shared(warps * group * width, slot=5), shared(8 * lists, slot=7)
        stores = [store(totals, g * lists + warp * 4 + t, load(sums_array, n_acc))]
        for j in range(width // 8):
            for k in (0, 1):
                total = load(sums_array, j * 4 + k) + load(sums_array, j * 4 + 2 + k)
                index = (warp * group + g) * width + j * 8 + t * 2 + k
                stores.append(store(partial, index, total, g < group))
        all_stores = UOp.group(*stores, *cache_stores)  # before the loop, whose C variables end with it
        partial, totals = partial.after(all_stores), totals.after(all_stores)

        # The result, with the new token, by as many threads as there are elements.
        n_elements = group * width
        loop = UOp.range((n_elements + (n_threads - 1) - thread) // n_threads, 2, AxisType.LOOP)
        # The minimum is for devices that run the loop's body in all threads.
        e = (loop * n_threads + thread).minimum(n_elements - 1)
        head, d = (e // width).minimum(group - 1), e % width
        head_top = top_of(head)
        new_weight = is_first.where((new_score(head) - head_top).exp2(), f32(0))
        total = tree([load(partial, e + k * n_elements) for k in range(warps)])
        weight = tree(load_run(totals, head * lists, lists)) + new_weight
        total = total + new_weight * load(new_values, d)
        element, is_first_element = (block.first_head + head) * dim + run * width + d, d.eq(0) & run.eq(0)
        sums_of_head = total, weight, head_top
        scale = None if block.prescale is None else prescale
        sink_of_head = None if block.sinks is None else load(own_sinks.after(ready, all_stores), head)
        results = block.store_result(element, head, is_first_element, sums_of_head, scale, sink=sink_of_head)
        shape = f"{split.limit}_{split.splits}_{group}_{warps}_{split.steps}_{split.across}"
        name = f"attention_flash_{h.name}_{shape}{'_sinks' * sinks}{'_wide' * wide}"
        return finish(name + f"_{tokens}" * (tokens > 0), [UOp.group(*results).end(loop)])

    return kernel


def split_half(value: UOp) -> tuple[UOp, UOp]:
    """A float32 as the sum of two float16: the rounded value, and the rounding error."""
    upper = value.cast(F16)
    return upper, (value - upper.cast(F32)).cast(F16)


def left_operand(upper: Sequence[UOp], lower: Sequence[UOp]) -> list[UOp]:
    """A thread's elements of a left tile of tensor cores, from its four elements of row g and of row g + 8."""
    return [*upper[:2], *lower[:2], *upper[2:], *lower[2:]]
