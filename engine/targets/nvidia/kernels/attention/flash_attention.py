"""Attention of one new token in decode, on tensor cores.

Tensor cores multiply tiles of 16 rows. A block's query heads, at most eight, rounded to half precision, are the upper
eight rows; the others are zeros. In the product with the values they are the same heads again, for the second of two
neighbouring dimensions: so both of a word are used as they lie. A warp works on sixteen tokens at a time. The tokens
are assigned to threads such that the thread that computes a token's score needs its weight as an operand of the product
with the values (as in `attention_sums`), so scores stay in their thread. A warp keeps its own
largest score: whenever it grows, the sums so far shrink. So warps meet only at the end. A large head does not fit into
the registers of a warp: then several warps share the dimensions of their tokens, and add their parts of the scores
through shared memory.

The cache is read once, straight to registers, sixteen bytes at a time. Loads are issued a round ahead of their use, and
the first ones before everything else. In a step of one sequence that is before the QKV product has ended
(`begins_early`, `engine.fixes.early_launch`): all but the new token's rows was there before. All blocks of a key
head go through the tokens side by side, so that each has as many as the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints, Release
from engine.targets.nvidia.kernels.attention.cache_fragments import Loads, fragments, upper_rows
from engine.targets.nvidia.kernels.attention.decode_block import DecodeBlock, block_buffers
from engine.targets.nvidia.kernels.attention.kv_cache import TILE, Heads
from engine.targets.nvidia.kernels.device import spills_early
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.matmul import wmma
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    LOWEST,
    U32,
    after_store,
    all_of,
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
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT

_MAX_HEADS = 8  # query heads in a block
_MIN_PART, _MAX_PART = 64, 2048  # tokens of a part: at least, for a window; at most, of several sequences
_MAX_SUMS_BYTES = 16 << 10  # of a block's shared memory, for the sums of all dimensions
_MAX_SHARED_BYTES = 46 << 10  # of a block
_MAX_DIM, _WAY = 256, 128  # dimensions that one warp has of its tokens: at most, and if several share them
_UNLIKE = 4096  # tokens of the longest sequence, beyond which most others of a step are much shorter
_DEEP = 8192  # tokens, beyond which more blocks read a quantized cache faster (measured)
_LARGEST = 60000.0  # scores are compared as half-precision numbers of up to this magnitude


@dataclass(frozen=True)
class FlashSplit:
    """How the attention of a decode step is divided: up to `limit` cached tokens in `splits` parts; a block has `group`
    heads, one of `across` runs of the values' dimensions, and `warps` warps with `steps` times sixteen tokens each, or
    for each of these `ways` warps, which share the dimensions. `blocks`: the minimum of resident blocks on a
    multiprocessor (`engine.fixes.launch_bounds`); 0 for none."""

    limit: int
    splits: int
    group: int
    warps: int
    steps: int = 1
    across: int = 1
    ways: int = 1
    blocks: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.ways

    @property
    def rounds(self) -> int:
        """The largest number of rounds of `steps` that a warp needs for its part."""
        return -(-self.limit // (self.splits * self.warps * self.steps * TILE))

    def shared_bytes(self, dim: int) -> int:
        """Shared memory of a block, except a few hundred bytes and gates: sums of warps, parts of scores, the new token
        and maxima."""
        token = -(-(self.group + 1) * dim // self.threads) * self.threads * 8
        parts = 2 * self.steps * self.threads * 16 if self.ways > 1 else 0
        return self.warps * self.group * (dim // self.across) * 4 + parts + token + self.warps * 256


def flash_split(heads: Heads, limit: int, short: int, multiprocessors: int) -> FlashSplit:
    """The division for up to `limit` tokens. Up to `short` tokens, a block reads all keys, and blocks share the values'
    dimensions (measured: reading all keys four times costs less than combining splits). For more, there are as many
    blocks as multiprocessors hold at a time, so that all stream the cache until the end."""
    limit = heads.cached(limit)
    group, warps, across, most_across, ways = _blocks(heads)
    if limit <= short:
        if heads.dim > _MAX_DIM:
            return FlashSplit(limit, 1, group, 4 if ways <= 4 else 2, 1, most_across, ways)
        steps = 1 if heads.gated and spills_early() else 2
        return FlashSplit(limit, 1, group, max(8, warps), steps, most_across)
    resident, steps, blocks = 2, 1, 0
    if heads.dim <= 64:  # registers allow more
        if not heads.window and 2 * warps * group * heads.dim * 4 <= _MAX_SUMS_BYTES:
            warps *= 2
        else:
            resident = 3
    elif heads.dim <= _WAY and heads.kv_format.is_quantized and not heads.window:
        # Loads are half as large, so there have to be more of them.
        resident, steps, blocks = (3, 1, 3) if limit > _DEEP else (2, 2, 0)
    splits = max(2, resident * multiprocessors // (heads.query // group))
    split = FlashSplit(limit, splits, group, warps, steps, across, ways, blocks)
    if heads.window:  # The few tokens by which `limit` exceeds it are to cost no round.
        fewer = min(splits, max(2, -(-limit // _MIN_PART)))
        split = min((replace(split, splits=n) for n in (fewer, fewer + 1)), key=lambda s: s.rounds)
    return split


def rows_split(heads: Heads, limit: int, tokens: int, multiprocessors: int) -> FlashSplit:
    """The division for `tokens` tokens of different sequences with up to `limit` tokens each. All of them together are
    to give two blocks for each multiprocessor. Beyond `_UNLIKE` tokens it is four: most of the sequences are as a rule
    much shorter than the longest one, whose parts take longest (measured: seven of 600 tokens and one of 8,000)."""
    limit = heads.cached(limit)
    group, warps, across, _, ways = _blocks(heads)
    resident = 2 if limit <= _UNLIKE else 4
    wanted = resident * multiprocessors // (tokens * (heads.query // group))
    splits = max(1, min(wanted, -(-limit // _MIN_PART)), -(-limit // _MAX_PART))
    return FlashSplit(limit, splits, group, warps, 1, across, ways)


def _blocks(heads: Heads) -> tuple[int, int, int, int, int]:
    """The heads and the warps of a block, the blocks that share the values' dimensions, the most that may, and the
    warps that share dimensions."""
    chunks, ways = heads.dim // 16, 1
    if heads.dim > _MAX_DIM:  # 512 in four, 576 in six
        ways = next(n for n in range(-(-heads.dim // _WAY), chunks + 1) if chunks % n == 0)
    max_group = min(_MAX_HEADS, heads.shared_by, (2048 if ways > 1 else 1024) // heads.dim)
    group = next(n for n in range(max(max_group, 1), 0, -1) if heads.shared_by % n == 0)
    if ways > 1:
        return group, 2, 1, next(n for n in (4, 3, 2, 1) if chunks // ways % n == 0), ways
    warps = max(4, -(-heads.dim // 32))
    least = heads.kv_format.block or 16
    runs = [n for n in (4, 2, 1) if heads.dim % (least * n) == 0]
    if warps * group * heads.dim * 4 <= _MAX_SUMS_BYTES:
        return group, warps, runs[-1], runs[0], 1
    if (
        heads.dim >= 2 * _WAY and not heads.window
    ):  # measured: a third of the time of blocks that share dimensions
        return group, 2, 1, runs[0], heads.dim // _WAY
    return group, warps, runs[0], runs[0], 1


@functools.cache
def flash_attention(
    heads: Heads, split: FlashSplit, sinks: bool = False, over_heads: bool = False, tokens: int = 0,
    order: Order = "columns", out_row: int = 0,
) -> Kernel:  # fmt: skip
    """Attention of one new token on tensor cores, or of those of `tokens` sequences, from `out_row` on in the result.
    Buffers: see `DecodeBlock`."""
    h, group, warps, ways, n_threads = heads, split.group, split.warps, split.ways, split.threads
    dim, width = h.dim, h.dim // split.across
    own_dims, own_width, lists = dim // ways, width // ways, warps * 4
    assert group <= _MAX_HEADS and h.shared_by % group == 0 and own_dims % 16 == 0 and own_width % 16 == 0
    gate_bytes = group * width * 4 if h.gated and split.splits == 1 else 0
    assert n_threads >= UNIT and split.shared_bytes(dim) + gate_bytes < _MAX_SHARED_BYTES

    def kernel(**buffers: UOp | list[UOp]) -> UOp:
        lane, all_warps = UOp.special(32, "lidx0"), UOp.special(warps * ways, "lidx1")
        thread, g, t = all_warps * 32 + lane, lane // 4, lane % 4
        warp, way = (all_warps // ways, all_warps % ways) if ways > 1 else (all_warps, UOp.const(0))
        block = DecodeBlock(
            h, split.splits, group, thread, n_threads, buffers, over_heads, tokens, order, out_row
        )
        run = UOp.special(split.across, "gidx2") if split.across > 1 else UOp.const(0)
        cache = fragments(block, g, t, (way * own_dims, own_dims), (run * width + way * own_width, own_width))

        def steps_of(round_: UOp | int) -> list[UOp]:
            return [
                ((round_ * split.steps + s) * split.splits + block.part) * warps + warp
                for s in range(split.steps)
            ]

        def loads(one: Callable[[UOp], Loads], round_: UOp | int) -> Loads:
            """Of all steps of a round."""
            of_steps = [one(step) for step in steps_of(round_)]
            return [[x for step in of_steps for x in step[k]] for k in range(len(of_steps[0]))]

        def prefetch(one: Callable[[UOp], Loads], slot: int) -> tuple[list[UOp], list[UOp]]:
            """Arrays of registers for the loads of a round, and the stores of round 0 to them."""
            first = loads(one, 0)
            arrays = [registers(len(x), slot + k, U32) for k, x in enumerate(first)]
            return arrays, stored(arrays, first)

        next_keys, key_stores = prefetch(cache.keys, 20)
        next_values, value_stores = prefetch(cache.values, 22)
        first_loads = [*key_stores, *value_stores]

        # The new token. The loads for the end of the kernel are issued here too.
        half, n = half_registers(), block.n_rotated
        new_rows, query_rows = shared(n, 1), shared(n, 10, half)
        elements = block.rotate(first_loads)
        stores = [store(new_rows, e, x) for e, x in elements]
        stores += [store(query_rows, e, x.cast(half)) for e, x in elements]
        new_values = shared(width, slot=8)
        if block.has_new:
            stores += block.new_value(new_values, run * width, width)
        input_scale = shared(UNIT, slot=9)
        if block.input_scale is not None:
            stores.append(
                store(input_scale, thread, load(block.input_scale, thread, thread < UNIT), thread < UNIT)
            )
        own_sinks, has_sink = shared(_MAX_HEADS, slot=12), thread < group
        if block.sinks is not None:
            sink = load(block.sinks, block.first_head + thread, has_sink)
            stores.append(store(own_sinks, thread, sink, has_sink))
        n_elements, is_gated = group * width, h.gated and block.is_whole
        gates = shared(n_elements if is_gated else 1, slot=13)
        for first in range(0, n_elements if is_gated else 0, n_threads):
            e = thread + first
            has_gate = None if first + n_threads <= n_elements else e < n_elements
            element = (block.first_head + e // width) * dim + run * width + e % width
            stores.append(store(gates, e, block.gate(element, has_gate), has_gate))
        ready = UOp.group(*stores, *first_loads)
        new_rows, query_rows, new_values, input_scale = (
            x.after(ready) for x in (new_rows, query_rows, new_values, input_scale)
        )
        next_keys, next_values = ([x.after(new_rows) for x in arrays] for arrays in (next_keys, next_values))
        cache_stores = block.store_token(new_rows, new_values, run, width)

        # Row g of a tile belongs to head g.
        head = g.minimum(group - 1)
        slope, queries = block.slope(head), []
        for c in range(own_dims // 16):
            quad = load_run(query_rows, head * dim + way * own_dims + c * 16 + t * 4, 4)
            queries.append(upper_rows(quad))
        partial_scores, new_scores = shared(1, slot=6), list[UOp]()
        if block.has_new:
            partial_scores, new_scores = block.partial_scores(new_rows, slot=6)
        many = split.rounds > 1
        of_round = split.splits * warps * split.steps * TILE
        rounds = (block.count + (of_round - 1)) // of_round
        loop = UOp.range(rounds, 0, AxisType.LOOP) if many else UOp.const(0)

        def so_far(array: UOp) -> UOp:
            return array.after(loop) if many else array

        def loaded(arrays: Sequence[UOp], s: int) -> Loads:
            """The loads of a step."""
            sizes = (array.max_numel() // split.steps for array in arrays)
            return [load_run(so_far(x), s * n, n) for x, n in zip(arrays, sizes, strict=True)]

        # The scores of a round, and the largest ones so far.
        tops = after_store(registers(1, 2), 0, f32(-_LARGEST))
        fours = [cache.scores(queries, loaded(next_keys, s)) for s in range(split.steps)]
        if ways > 1:
            fours = _added_ways(fours, loop, split, warp, way, lane)
        scores: list[UOp] = []
        for four, step in zip(fours, steps_of(loop), strict=True):
            tokens_of = (step * TILE + t * 4 + k for k in range(4))
            scores += [
                block.sees(x).where(block.sloped(x, h.capped(score), slope), f32(LOWEST))
                for x, score in zip(tokens_of, four, strict=True)
            ]
        old_top = load(so_far(tops), 0)
        top = maximum([old_top, *_of_row(maximum(scores), lane)])

        # The weights of tokens, and the weighted sums of values.
        n = cache.n_sums
        sums_array = zeroed_registers(n + 1, 3)  # the last is the sum of weights
        sums = load_run(so_far(sums_array), 0, n + 1)
        if many:
            shrink = (old_top - top).exp2()
            sums = [x * shrink for x in sums]
        top_store = store(tops, 0, top)
        for s in range(split.steps):
            weights = [(x > f32(LOWEST)).where((x - top).exp2(), f32(0)) for x in scores[4 * s : 4 * s + 4]]
            sums[:n] = cache.add(weights, loaded(next_values, s), sums[:n])
            sums[n] = chain([sums[n], *weights])
        used = UOp.group(*store_run(sums_array, 0, sums), top_store)
        if many:
            more_keys = stored([x.after(top_store) for x in next_keys], loads(cache.keys, loop + 1))
            more_values = stored([x.after(used) for x in next_values], loads(cache.values, loop + 1))
            used = UOp.group(used, *more_keys, *more_values).end(loop)
        sums_array, tops = sums_array.after(used), tops.after(used)
        partial, totals, largest = (
            shared(warps * group * width, slot=5),
            shared(8 * lists, slot=7),
            shared(8 * warps, slot=3),
        )
        is_first_way = way.eq(0) if ways > 1 else None
        stores = [store(totals, g * lists + warp * 4 + t, load(sums_array, n), is_first_way), *new_scores]
        stores.append(store(largest, g * warps + warp, load(tops, 0), all_of(t.eq(0), is_first_way)))
        for d, x in cache.results(load_run(sums_array, 0, n), t):
            stores.append(store(partial, (warp * group + g) * width + way * own_width + d, x, g < group))
        all_stores = UOp.group(*stores, *cache_stores)  # before the loop, whose C variables end with it
        partial, totals, largest, partial_scores = (
            x.after(all_stores) for x in (partial, totals, largest, partial_scores)
        )

        # The result, with the new token, by as many threads as there are elements.
        loop = UOp.range((n_elements + (n_threads - 1) - thread) // n_threads, 2, AxisType.LOOP)
        # The minimum is for devices that run the loop's body in all threads.
        e = (loop * n_threads + thread).minimum(n_elements - 1)
        head, d = (e // width).minimum(group - 1), e % width
        new_score = f32(LOWEST)
        if block.has_new:
            own_score = h.capped(tree(load_run(partial_scores, head * block.n_parts, block.n_parts)))
            new_score = block.is_first_part.where(own_score, new_score)
        tops_of_warps = load_run(largest, head * warps, warps)
        head_top = maximum([new_score, *tops_of_warps])
        new_weight = (new_score - head_top).exp2()
        factors = [(x - head_top).exp2() for x in tops_of_warps]
        sums_of_warps = [load(partial, e + k * n_elements) for k in range(warps)]
        total = tree([x * f for x, f in zip(sums_of_warps, factors, strict=True)])
        weights_of_warps = [tree(load_run(totals, head * lists + 4 * k, 4)) for k in range(warps)]
        weight = tree([x * f for x, f in zip(weights_of_warps, factors, strict=True)]) + new_weight
        if block.has_new:
            total = total + new_weight * load(new_values, d).cast(F16).cast(F32)
        element, is_first_element = (block.first_head + head) * dim + run * width + d, d.eq(0) & run.eq(0)
        sums_of_head = total, weight, head_top
        scale = None if block.input_scale is None else input_scale
        sink_of_head = None if block.sinks is None else load(own_sinks.after(ready, all_stores), head)
        gate = load(gates.after(ready, all_stores), e) if is_gated else None
        results = block.store_result(element, head, is_first_element, sums_of_head, scale, sink_of_head, gate)
        shape = f"{split.limit}_{split.splits}_{group}_{warps}_{split.steps}_{split.across}_{ways}"
        name = f"attention_flash_{h.name}_{shape}{'_sinks' * sinks}{'_over_heads' * over_heads}"
        name += f"_{tokens}_{order}_{out_row}" * (tokens > 0) + f"_{split.blocks}_blocks" * (split.blocks > 0)
        return finish(name, [UOp.group(*results).end(loop)])

    waits_for = ("rows",) if begins_early(split, sinks) and not tokens else ()
    # Blocks of one part leave most multiprocessors idle: there the output product may load its weights meanwhile.
    releases: Release = "at its end" if tokens or split.splits > 1 else "after its wait"
    hints = LaunchHints(split.blocks, waits_for=waits_for, releases=releases)
    return Kernel(kernel, *block_buffers(h, split.splits, sinks, tokens), hints)


def begins_early(split: FlashSplit, sinks: bool) -> bool:
    """Whether the kernel of one sequence begins before the QKV product has ended, whose kernel lets it start. That of
    one part with sinks does not (measured: half a microsecond more for each layer of gpt-oss)."""
    return split.splits > 1 or not sinks


def _added_ways(
    fours: Sequence[list[UOp]], loop: UOp, split: FlashSplit, warp: UOp, way: UOp, lane: UOp
) -> list[list[UOp]]:
    """The scores of each step, from the parts of the warps that share dimensions. All warps do a round at the same
    time: there is room for the parts of two, so that the parts of the round before may still be read."""
    size = len(fours) * split.threads * 4
    parts = shared(2 * size, slot=13)
    first = loop % 2 * size if split.rounds > 1 else UOp.const(0)

    def place(s: int, way: UOp | int) -> UOp:
        return first + ((s * split.warps + warp) * split.ways + way) * 128 + lane * 4

    stores = [x for s, four in enumerate(fours) for x in store_run(parts, place(s, way), four)]
    parts = parts.after(UOp.group(*stores))
    ways = [[load_run(parts, place(s, k), 4) for k in range(split.ways)] for s in range(len(fours))]
    return [[tree(column) for column in zip(*of_step, strict=True)] for of_step in ways]


def stored(arrays: Sequence[UOp], loads: Loads) -> list[UOp]:
    """The stores of loads to arrays of registers."""
    return [x for array, values in zip(arrays, loads, strict=True) for x in store_run(array, 0, values)]


def _of_row(value: UOp, lane: UOp) -> list[UOp]:
    """The values of the four threads that share row g of a tile, rounded to half precision, so that all four get the
    same numbers. They come through tensor cores, for which a warp need not wait for others: each thread puts its value
    into a left tile, and the right tiles are columns with a one."""
    source, zero = lane // 4, f32(0).cast(F16)
    own = value.maximum(f32(-_LARGEST)).minimum(f32(_LARGEST)).cast(F16)
    left = upper_rows([own, zero, zero, zero])
    results = [own.cast(F32)]
    for ahead, n in ((source % 2 + 1, 2), (UOp.const(3), 1)):
        one = (lane % 4).eq((source // 2 + ahead) % 4).where(f32(1), f32(0)).cast(F16)
        results += wmma(left, [one, zero, zero, zero], [f32(0)] * 4)[:n]
    return results
