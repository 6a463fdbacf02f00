"""Causal attention of a prompt's chunk on tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.cache_tiles import eight_keys, eight_values
from engine.kernels.gpu.few_columns import column_index
from engine.kernels.gpu.kv_cache import CACHE_SLACK, Heads, Pages
from engine.kernels.gpu.matmul import fragment_index, wmma
from engine.kernels.gpu.uops import (
    F16,
    INDEX,
    LOG2_E,
    LOWEST,
    chain,
    f32,
    finish,
    load,
    load_index,
    load_run,
    maximum,
    shared,
    store,
    store_run,
    zeroed_registers,
)

_MAX_SHARED_BYTES = 40 << 10  # of a block; every GPU has 48 KB


def query_index(heads: Heads, tokens: int, head: UOp, token: UOp, d: UOp) -> UOp:
    """The index of an element of the queries, which are [head, 16 tokens, 16 dimensions, thread, element]: a left tile
    of tensor cores. Thread 4g + t has the t-th four dimensions of tokens g and g + 8."""
    thread, i = token % 8 * 4 + d % 16 // 4, d % 4
    element = i // 2 * 4 + token % 16 // 8 * 2 + i % 2
    return (((head * (tokens // 16) + token // 16) * (heads.dim // 16) + d // 16) * 32 + thread) * 8 + element


@dataclass(frozen=True)
class PromptTiling:
    """How prefill attention is divided. A warp has 16 * `rows` queries of a head; a block has `warps` such warps, which
    read the same keys, and `parts` times as many, which share the queries and take turns with the keys: `steps` times
    sixteen keys each time."""

    rows: int
    warps: int
    parts: int
    steps: int

    def shared_bytes(self, dim: int) -> int:
        """Shared memory of a block: the sums that the other parts pass to the first one, and the largest scores."""
        sums = (self.parts - 1) * self.rows * accumulators(dim)
        return (sums + self.parts * 2 * self.rows) * self.warps * 32 * 4


@functools.cache
def tile_prompt(heads: Heads, blocks: int) -> Kernel:
    """Copies the keys and values of all tokens so far to the order in which the threads of `attend_prompt` hold them,
    in float16. Buffers: tiles of keys, float16 (key heads, tiled / 16, dim / 16, thread, 8); tiles of values, float16
    (the same); the cache (`Heads.cache_planes`); the prompt, int32 (2,): position and number of tokens. Each block
    copies every `blocks`-th tile of sixteen tokens. With a window, the tiles begin with the one of the first token that
    the chunk sees (`first_tile`). With a pool, the tables of blocks, int32 (sequences, `Heads.table_size`), come before
    the prompt, int32 (3,): also its sequence."""
    h, chunks = heads, heads.dim // 16

    def kernel(key_tiles: UOp, value_tiles: UOp, *buffers: UOp) -> UOp:
        n = len(h.cache_planes)
        cache, rest = buffers[:n], buffers[n:]
        prompt, pages = rest[-1], pages_of(h, rest[0], rest[-1])
        thread, c = UOp.special(32, "lidx0"), UOp.special(chunks, "lidx1")
        block, kv = UOp.special(blocks, "gidx0"), UOp.special(h.kv, "gidx1")
        g, t = thread // 4, thread % 4
        position = load_index(prompt, 0, h.length - CACHE_SLACK)
        seen, first = position + load_index(prompt, 1, CACHE_SLACK), first_tile(h, position)
        steps = (seen + 15) // 16 - first
        loop = UOp.range((steps - block + (blocks - 1)) // blocks, 0, AxisType.LOOP)
        step = loop * blocks + block
        tile = h.tile(kv, first, step, pages=pages)
        index = tile_index(h, kv, step, c, thread)
        stores = store_run(key_tiles, index, eight_keys(h, cache, tile, c, t, g))
        stores += store_run(value_tiles, index, eight_values(h, cache, tile, c, t, g))
        return finish(f"prefill_tile_{h.name}_{blocks}", [UOp.group(*stores).end(loop)])

    return kernel


def pages_of(heads: Heads, table: UOp | None, prompt: UOp) -> Pages | None:
    """The blocks of the prompt's sequence, if the cache is a pool."""
    if not heads.pool:
        return None
    assert table is not None
    return Pages(table, load(prompt, 2).cast(INDEX) * heads.table_size)


def first_tile(heads: Heads, position: UOp) -> UOp:
    """The first tile of sixteen tokens that queries from `position` on see."""
    return heads.first_seen(position) // 16


def tile_index(heads: Heads, kv: UOp, step: UOp, chunk: UOp | int, thread: UOp) -> UOp:
    """The index of a thread's eight elements in the tiles: four dimensions of two neighbouring keys, or the values of
    four tokens in two neighbouring dimensions. `step` counts tiles of sixteen tokens from the first tile on."""
    return (((kv * (heads.tiled // 16) + step) * (heads.dim // 16) + chunk) * 32 + thread) * 8


def accumulators(dim: int) -> int:
    """A thread's accumulators for sixteen queries: the weighted sums of values, and the sums of weights, computed as if
    the values had another column of ones."""
    return (dim // 8 + 1) * 4


def prompt_tiling(heads: Heads, tokens: int) -> PromptTiling:
    """The tiling for a chunk of `tokens` tokens. A warp loads the keys once for all its queries, and these loads limit
    the speed for many queries, so a warp gets as many queries as its registers hold, and the larger heads leave room
    for the scores of one step only. Few queries give too few warps, so several of them share the keys."""
    few = tokens <= 64
    rows, warps, steps = (1, 1, 1) if few else (2 if heads.dim <= 64 else 1, 2, 2 if heads.dim <= 128 else 1)
    tilings = [PromptTiling(rows, warps, parts, steps) for parts in ((8, 4, 2, 1) if few else (2, 1))]
    return next((t for t in tilings if t.shared_bytes(heads.dim) <= _MAX_SHARED_BYTES), tilings[-1])


def _turns(
    heads: Heads, first: UOp, last: UOp, seen: UOp, size: int, live: UOp
) -> list[tuple[UOp, Callable[[UOp], UOp], bool]]:
    """The turns of `size` keys for the queries of tokens `first` to `last`, of which the last sees `seen` keys; none if
    they are not `live`. Those that all queries see whole, then those that need a mask: (how many there are, the number
    of each, whether there is a mask). Tokens are counted from the first tile's on."""
    whole, end = live.where((first + 1) // size, 0), (seen + (size - 1)) // size
    if not heads.window:
        return [(whole, lambda i: i, False), (live.where(end - whole, 0), lambda i: i + whole, True)]
    # a window's turns are `left` masked ones, those between `start` and `stop`, and more masked ones
    start = ((heads.first_seen(last) + (size - 1)) // size).minimum(end)
    stop, left = whole.maximum(start), start - heads.first_seen(first) // size
    return [
        (live.where(stop - start, 0), lambda i: i + start, False),
        (
            live.where(left + (end - stop), 0),
            lambda i: (i < left).where(i + (start - left), i + (stop - left)),
            True,
        ),
    ]


@functools.cache
def attend_prompt(
    heads: Heads, tokens: int, tiling: PromptTiling, sinks: bool = False, columns: bool = False
) -> Kernel:
    """Causal attention of a prompt over the cache. Scores stay in registers: a first pass over the keys finds each
    query's largest score, and a second pass sums the values. The threads of a warp share queries and have different
    keys, so they exchange results only after a pass. Query heads that share keys are neighbours in a block, which loads
    the keys once. Buffers: the output, float16 fragments of (tokens, query heads * dim), or `columns` of
    `engine.kernels.gpu.few_columns`; the queries of
    `engine.kernels.gpu.prefill.rotate_prompt`; the tiles of `tile_prompt`; the prompt, int32 (2,): position and number
    of tokens; with `sinks`, float32 (query heads,): a score of each head that is not scaled and weighs no value."""
    h, dim, rows, warps, parts = heads, heads.dim, tiling.rows, tiling.warps, tiling.parts
    chunks, tiles = dim // 16, tokens // (16 * rows)
    blocks = h.shared_by * tiles // warps  # of a key head
    assert dim % 16 == 0 and tokens % (16 * rows) == 0 and h.shared_by * tiles % warps == 0

    def kernel(out: UOp, queries: UOp, keys: UOp, values: UOp, prompt: UOp, *sink: UOp) -> UOp:
        thread, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1") if warps > 1 else UOp.const(0)
        part = UOp.special(parts, "lidx2") if parts > 1 else UOp.const(0)
        block, kv = UOp.special(blocks, "gidx0"), UOp.special(h.kv, "gidx1")
        unit = (blocks - 1 - block) * warps + warp  # the longest work starts first
        head, tile = kv * h.shared_by + unit % h.shared_by, unit // h.shared_by * rows
        g, t = thread // 4, thread % 4
        position, n = load_index(prompt, 0, h.length - CACHE_SLACK), load_index(prompt, 1, tokens + 1)
        first, live = tile * 16, tile * 16 < n
        begin = first_tile(h, position) * 16
        own = position - begin + first  # the first query's token
        seen = (own + 16 * rows).minimum(position - begin + n)
        turns = _turns(h, own, own + (16 * rows - 1), seen, 16 * parts * tiling.steps, live)
        q = [
            load_run(queries, (((head * (tokens // 16) + tile + r) * chunks + c) * 32 + thread) * 8, 8)
            for r in range(rows)
            for c in range(chunks)
        ]

        def scores(step: UOp, masked: bool) -> list[list[UOp]]:
            """The scores of a thread's four neighbouring keys, for each of its rows of queries: row g of the first
            tile, its row g + 8, row g of the second tile, and so on."""
            pairs = [load_run(keys, tile_index(h, kv, step, c, thread), 8) for c in range(chunks)]
            result = []
            for r in range(rows):
                acc = [[f32(0)] * 4 for _ in (0, 1)]
                for c in range(chunks):
                    for half in (0, 1):
                        acc[half] = wmma(q[r * chunks + c], pairs[c][half * 4 : half * 4 + 4], acc[half])
                for side in (0, 1):
                    four = [acc[e % 2][2 * side + e // 2] for e in range(4)]
                    if masked:
                        ahead = own + (16 * r + 8 * side) + g - (step * 16 + t * 4)
                        sees = [ahead >= e for e in range(4)]
                        if h.window:
                            sees = [ok & (ahead < h.window + e) for e, ok in enumerate(sees)]
                        four = [ok.where(x, f32(LOWEST)) for ok, x in zip(sees, four, strict=True)]
                    result.append(four)
            return result

        lanes = warps * 32

        def steps_of(turn: UOp) -> list[UOp]:
            return [(turn * tiling.steps + k) * parts + part for k in range(tiling.steps)]

        def maxima(own: Sequence[UOp]) -> list[UOp]:
            """The largest value for each row among the four threads and all parts that share the row."""
            n = len(own)
            values = shared(parts * lanes * n, slot=0)
            index = ((part * warps + warp) * 32 + thread) * n
            values = values.after(UOp.group(*store_run(values, index, own)))
            others = [((k * warps + warp) * 32 + g * 4 + j) * n for k in range(parts) for j in range(4)]
            return [maximum([load(values, other + r) for other in others]) for r in range(n)]

        row_max: list[UOp] = []
        for axis, (count, turn_of, masked) in enumerate(turns):
            loop = UOp.range(count, axis, AxisType.REDUCE)
            all_scores = [scores(s, masked) for s in steps_of(turn_of(loop))]
            largest = [maximum([x for s in all_scores for x in s[r]]) for r in range(2 * rows)]
            row_max += [x.reduce(loop, arg=Ops.MAX) for x in largest]
        unmasked_and_masked = zip(row_max[: 2 * rows], row_max[2 * rows :], strict=True)
        top = maxima([a.alu(Ops.MAX, b) for a, b in unmasked_and_masked])
        if sinks:
            sink_score = load(sink[0], head) * f32(LOG2_E)
            top = [x.alu(Ops.MAX, sink_score) for x in top]

        per_row = accumulators(dim) // 4
        n_acc = rows * per_row * 4
        ones = [f32(1).cast(F16)] * 4
        acc = zeroed_registers(n_acc, 1)
        for axis, (count, turn_of, masked) in enumerate(turns, 2):
            loop = UOp.range(count, axis, AxisType.REDUCE)
            sums = load_run(acc.after(loop), 0, n_acc)
            for step in steps_of(turn_of(loop)):
                s = scores(step, masked)
                weights = [[(x - top[r]).exp2().cast(F16) for x in s[r]] for r in range(2 * rows)]
                # a left tile's elements of a thread: two of row g, two of row g + 8, and the same again
                lefts = [
                    [weights[2 * r + side][k + i] for k in (0, 2) for side in (0, 1) for i in (0, 1)]
                    for r in range(rows)
                ]
                for j in range(per_row):
                    if j == per_row - 1:
                        right = ones
                    elif j % 2 == 0:
                        pair = load_run(values, tile_index(h, kv, step, j // 2, thread), 8)
                        right = pair[:4]
                    else:
                        right = pair[4:]
                    for r in range(rows):
                        k = (r * per_row + j) * 4
                        sums[k : k + 4] = wmma(lefts[r], right, sums[k : k + 4])
            acc = acc.after(UOp.group(*store_run(acc, 0, sums)).end(loop))
        result = load_run(acc, 0, n_acc)
        if parts > 1:
            others = shared((parts - 1) * n_acc * lanes, slot=3)
            lane = warp * 32 + thread
            first_index = ((part - 1) * n_acc) * lanes + warp * 32 + thread
            others = others.after(UOp.group(*store_run(others, first_index, result, part > 0, stride=lanes)))
            for i, x in enumerate(result):
                other_sums = (load(others, (k * n_acc + i) * lanes + lane) for k in range(parts - 1))
                result[i] = chain([x, *other_sums])
        stores = []
        for r in range(rows):
            sums = result[r * per_row * 4 : (r + 1) * per_row * 4]
            totals = [sums[-4 + 2 * side] for side in (0, 1)]
            if sinks:
                totals = [x + (sink_score - top[2 * r + side]).exp2() for side, x in enumerate(totals)]
            factor = [x.reciprocal() for x in totals]
            for j in range(chunks):
                for side in (0, 1):
                    for e in range(4):
                        value = sums[(2 * j + e % 2) * 4 + 2 * side + e // 2] * factor[side]
                        token, column = (tile + r) * 16 + g + 8 * side, head * dim + j * 16 + t * 4 + e
                        index = (column_index if columns else fragment_index)(token, column, h.query * dim)
                        ok = live if parts == 1 else live & part.eq(0)
                        stores.append(store(out, index, value.cast(F16), ok))
        shape = f"{rows}_{warps}_{parts}_{tiling.steps}"
        return finish(f"prefill_attend_{h.name}_{tokens}_{shape}", stores)

    return kernel
