"""Attention of one new token in decode, on tensor cores.

Tensor cores multiply tiles of 16 rows. A block's query heads, at most eight, rounded to half precision, are the upper
eight rows; the others are zeros. In the product with the values they are the same heads again, for the second of two
neighbouring dimensions: so both of a word are used as they lie. A warp works on sixteen tokens at a time. The tokens
are assigned to threads such that the thread that computes a token's score needs its weight as an operand of the product
with the values (as in `attention_sums`), so scores stay in their thread. A warp keeps its own largest score: whenever
it grows, the sums so far shrink. So warps meet only at the end. A large head does not fit into the registers of a warp:
then several warps share the dimensions of their tokens, and add their parts of the scores through shared memory.

The cache is read once, straight to registers, sixteen bytes at a time. Loads are issued a round ahead of their use, and
the first ones before everything else. In a step of one sequence that is before the QKV product has ended
(`engine.fixes.early_launch`): all but the new token's rows was there before. All blocks of a key head go through the
tokens side by side, so that each has as many as the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    # Measured: a third of the time of blocks that share dimensions.
    if heads.dim >= 2 * _WAY and not heads.window:
        return group, 2, 1, runs[0], heads.dim // _WAY
    return group, warps, runs[0], runs[0], 1


@functools.cache
def flash_attention(
    heads: Heads, split: FlashSplit, sinks: bool = False, over_heads: bool = False, tokens: int = 0,
    order: Order = "columns", out_row: int = 0,
) -> Kernel:  # fmt: skip
    """Attention of one new token on tensor cores, or of those of `tokens` sequences, from `out_row` on in the result.
    Buffers: see `DecodeBlock`."""
    h, width = heads, heads.dim // split.across
    gate_bytes = split.group * width * 4 if h.gated and split.splits == 1 else 0
    assert split.group <= _MAX_HEADS and h.shared_by % split.group == 0
    assert h.dim // split.ways % 16 == 0 and width // split.ways % 16 == 0
    assert split.threads >= UNIT and split.shared_bytes(h.dim) + gate_bytes < _MAX_SHARED_BYTES

    def kernel(**buffers: UOp | list[UOp]) -> UOp:
        block = _FlashBlock(h, split, buffers, over_heads, tokens, order, out_row)
        shape = f"{split.limit}_{split.splits}_{split.group}_{split.warps}_{split.steps}_{split.across}_{split.ways}"
        name = f"attention_flash_{h.name}_{shape}{'_sinks' * sinks}{'_over_heads' * over_heads}"
        name += f"_{tokens}_{order}_{out_row}" * (tokens > 0) + f"_{split.blocks}_blocks" * (split.blocks > 0)
        return finish(name, [block.attended()])

    waits_for = () if tokens else ("rows",)
    # Blocks of one part leave most multiprocessors idle: there the output product may load its weights meanwhile.
    releases: Release = "at its end" if tokens or split.splits > 1 else "after its wait"
    # Norms are in no cache, and would come after the new token's rows. All three are older than the kernel before.
    first = () if tokens or heads.norm_eps is None else ("angles", "norms", "input_scale")
    hints = LaunchHints(split.blocks, waits_for=waits_for, releases=releases, loads_first=first)
    return Kernel(kernel, *block_buffers(h, split.splits, sinks, tokens), hints)


class _NewToken(NamedTuple):
    """What a block has of the new token in shared memory, once all threads have stored it: the rotated queries and the
    key, float32, and in the type of tensor cores; the value; the scale of the output; and the heads' sinks and the
    elements' gates, if there are any: of these two, after `ready`. `stores` are those of its key and value to the
    cache."""

    rows: UOp
    queries: UOp
    value: UOp
    input_scale: UOp | None
    sinks: UOp | None
    gates: UOp | None
    ready: UOp
    stores: list[UOp]


class _Totals(NamedTuple):
    """What the warps of a block have found, in shared memory: the weighted sums of values (warp, head, dimension), the
    sums of weights (head, warp, thread of four), the largest scores (head, warp), and the new key's scores in parts:
    after all is stored (`done`)."""

    values: UOp
    weights: UOp
    tops: UOp
    new_scores: UOp
    done: UOp


class _FlashBlock(DecodeBlock):
    """A block of decode attention as threads of tensor cores: thread 4g + t (`lane`) of a `warp`. Of its tokens, a warp
    has the dimensions of one of the `ways`; the block has one `run` of the values' dimensions, `width` of them."""

    def __init__(
        self, heads: Heads, split: FlashSplit, buffers: Mapping[str, Any], over_heads: bool, tokens: int, order: Order,
        out_row: int,
    ) -> None:  # fmt: skip
        warps, ways = split.warps, split.ways
        self.split, self.lane, all_warps = split, UOp.special(32, "lidx0"), UOp.special(warps * ways, "lidx1")
        thread = all_warps * 32 + self.lane
        super().__init__(
            heads, split.splits, split.group, thread, split.threads, buffers, over_heads, tokens, order, out_row,
        )  # fmt: skip
        self.g, self.t = self.lane // 4, self.lane % 4
        self.warp, self.way = (all_warps // ways, all_warps % ways) if ways > 1 else (all_warps, UOp.const(0))
        self.run = UOp.special(split.across, "gidx2") if split.across > 1 else UOp.const(0)
        self.width = heads.dim // split.across
        self.own_dims, self.own_width = heads.dim // ways, self.width // ways
        self.n_elements = split.group * self.width
        self.cache_parts = fragments(
            self, self.g, self.t, (self.way * self.own_dims, self.own_dims),
            (self.run * self.width + self.way * self.own_width, self.own_width),
        )  # fmt: skip

    def attended(self) -> UOp:
        """The stores of the result, and of the new token."""
        keys, first_keys = self._prefetched(self.cache_parts.keys, 20)
        values, first_values = self._prefetched(self.cache_parts.values, 22)
        new = self._new_token([*first_keys, *first_values])
        # The first loads are issued before the new token is ready.
        keys, values = ([x.after(new.rows) for x in arrays] for arrays in (keys, values))
        totals = self._met(new, *self._rounds(new.queries, keys, values))
        rounds = (self.n_elements + (self.n_threads - 1) - self.thread) // self.n_threads
        loop = UOp.range(rounds, 2, AxisType.LOOP)
        # The minimum is for devices that run the loop's body in all threads.
        e = (loop * self.n_threads + self.thread).minimum(self.n_elements - 1)
        return UOp.group(*self._result(e, new, totals)).end(loop)

    # ---- loads of the cache ---------------------------------------------------------------------------

    def _steps_of(self, round_: UOp | int) -> list[UOp]:
        """The numbers of a warp's steps in a round."""
        split = self.split
        return [
            ((round_ * split.steps + s) * split.splits + self.part) * split.warps + self.warp
            for s in range(split.steps)
        ]

    def _loads(self, one: Callable[[UOp], Loads], round_: UOp | int) -> Loads:
        """The loads of all steps of a round."""
        of_steps = [one(step) for step in self._steps_of(round_)]
        return [[x for step in of_steps for x in step[k]] for k in range(len(of_steps[0]))]

    def _prefetched(self, one: Callable[[UOp], Loads], slot: int) -> tuple[list[UOp], list[UOp]]:
        """Arrays of registers for the loads of a round, and the stores of round 0 to them."""
        first = self._loads(one, 0)
        arrays = [registers(len(x), slot + k, U32) for k, x in enumerate(first)]
        return arrays, stored(arrays, first)

    def _loaded(self, arrays: Sequence[UOp], s: int) -> Loads:
        """The loads of a step, from the arrays of its round."""
        sizes = (array.max_numel() // self.split.steps for array in arrays)
        return [load_run(x, s * n, n) for x, n in zip(arrays, sizes, strict=True)]

    # ---- the new token --------------------------------------------------------------------------------

    def _new_token(self, first_loads: Sequence[UOp]) -> _NewToken:
        """The new token, after the `first_loads` of the cache. What the end of the kernel needs is loaded here too."""
        n, half, thread = self.n_rotated, half_registers(), self.thread
        rows, queries = shared(n, 1), shared(n, 10, half)
        elements = self.rotate(first_loads)
        stores = [store(rows, e, x) for e, x in elements]
        stores += [store(queries, e, x.cast(half)) for e, x in elements]
        value, scale = shared(self.width, slot=8), shared(UNIT, slot=9)
        if self.has_new:
            stores += self.new_value(value, self.run * self.width, self.width)
        if self.input_scale is not None:
            stores.append(store(scale, thread, load(self.input_scale, thread, thread < UNIT), thread < UNIT))
        own_sinks, has_sink = shared(_MAX_HEADS, slot=12), thread < self.group
        if self.sinks is not None:
            sink = load(self.sinks, self.first_head + thread, has_sink)
            stores.append(store(own_sinks, thread, sink, has_sink))
        gates, is_gated = shared(self.n_elements, slot=13), self.heads.gated and self.is_whole
        if is_gated:
            stores += self._gate_stores(gates)
        ready = UOp.group(*stores, *first_loads)
        rows, value = rows.after(ready), value.after(ready)
        return _NewToken(
            rows, queries.after(ready), value,
            None if self.input_scale is None else scale.after(ready),
            None if self.sinks is None else own_sinks,
            gates if is_gated else None,
            ready,
            self.store_token(rows, value, self.run, self.width),
        )  # fmt: skip

    def _gate_stores(self, gates: UOp) -> list[UOp]:
        """The stores of the gates of the block's elements."""
        stores = []
        for first in range(0, self.n_elements, self.n_threads):
            e = self.thread + first
            has_gate = None if first + self.n_threads <= self.n_elements else e < self.n_elements
            stores.append(store(gates, e, self.gate(self._element(e), has_gate), has_gate))
        return stores

    def _element(self, e: UOp) -> UOp:
        """The place of an element of the block in the result (query * dim)."""
        head, d = e // self.width, e % self.width
        return (self.first_head + head) * self.heads.dim + self.run * self.width + d

    # ---- the cached tokens ----------------------------------------------------------------------------

    def _rounds(self, query_rows: UOp, keys: Sequence[UOp], values: Sequence[UOp]) -> tuple[UOp, UOp]:
        """Registers with a thread's weighted sums of values and, last, its sum of weights; and with its largest score:
        after all rounds. `keys` and `values` hold what was loaded for the first one."""
        split, parts = self.split, self.cache_parts
        many, n = split.rounds > 1, parts.n_sums
        of_round = split.splits * split.warps * split.steps * TILE
        rounds = (self.count + (of_round - 1)) // of_round
        loop = UOp.range(rounds, 0, AxisType.LOOP) if many else UOp.const(0)

        def so_far(array: UOp) -> UOp:
            return array.after(loop) if many else array

        tops, sums_array = after_store(registers(1, 2), 0, f32(-_LARGEST)), zeroed_registers(n + 1, 3)
        scores = self._scores(loop, query_rows, [so_far(x) for x in keys])
        old_top = load(so_far(tops), 0)
        top = maximum([old_top, *_of_row(maximum(scores), self.lane)])
        sums = load_run(so_far(sums_array), 0, n + 1)
        if many:
            shrink = (old_top - top).exp2()
            sums = [x * shrink for x in sums]
        for s in range(split.steps):
            weights = [(x > f32(LOWEST)).where((x - top).exp2(), f32(0)) for x in scores[4 * s : 4 * s + 4]]
            sums[:n] = parts.add(weights, self._loaded([so_far(x) for x in values], s), sums[:n])
            sums[n] = chain([sums[n], *weights])
        top_store = store(tops, 0, top)
        used = UOp.group(*store_run(sums_array, 0, sums), top_store)
        if many:
            more_keys = stored([x.after(top_store) for x in keys], self._loads(parts.keys, loop + 1))
            more_values = stored([x.after(used) for x in values], self._loads(parts.values, loop + 1))
            used = UOp.group(used, *more_keys, *more_values).end(loop)
        return sums_array.after(used), tops.after(used)

    def _scores(self, loop: UOp, query_rows: UOp, keys: Sequence[UOp]) -> list[UOp]:
        """A thread's scores in a round: of four tokens of each step, and of head g."""
        split, h, head = self.split, self.heads, self.g.minimum(self.group - 1)
        first = head * h.dim + self.way * self.own_dims
        queries = [
            upper_rows(load_run(query_rows, first + c * 16 + self.t * 4, 4))
            for c in range(self.own_dims // 16)
        ]
        fours = [self.cache_parts.scores(queries, self._loaded(keys, s)) for s in range(split.steps)]
        if split.ways > 1:
            fours = _added_ways(fours, loop, split, self.warp, self.way, self.lane)
        slope, scores = self.slope(head), list[UOp]()
        for four, step in zip(fours, self._steps_of(loop), strict=True):
            tokens = (step * TILE + self.t * 4 + k for k in range(4))
            scores += [
                self.sees(x).where(self.sloped(x, h.capped(score), slope), f32(LOWEST))
                for x, score in zip(tokens, four, strict=True)
            ]
        return scores

    # ---- the end --------------------------------------------------------------------------------------

    def _met(self, new: _NewToken, sums: UOp, tops: UOp) -> _Totals:
        """What all warps have found, once all have stored it."""
        warps, lists = self.split.warps, self.split.warps * 4
        values, weights = shared(warps * self.group * self.width, slot=5), shared(8 * lists, slot=7)
        largest, new_scores, stores = shared(8 * warps, slot=3), shared(1, slot=6), list[UOp]()
        if self.has_new:
            new_scores, stores = self.partial_scores(new.rows, slot=6)
        n, is_first_way = self.cache_parts.n_sums, self.way.eq(0) if self.split.ways > 1 else None
        place = self.g * lists + self.warp * 4 + self.t
        stores = [store(weights, place, load(sums, n), is_first_way), *stores]
        is_first = all_of(self.t.eq(0), is_first_way)
        stores.append(store(largest, self.g * warps + self.warp, load(tops, 0), is_first))
        row = (self.warp * self.group + self.g) * self.width + self.way * self.own_width
        for d, x in self.cache_parts.results(load_run(sums, 0, n), self.t):
            stores.append(store(values, row + d, x, self.g < self.group))
        done = UOp.group(*stores, *new.stores)  # before the loop, whose C variables end with it
        return _Totals(
            values.after(done), weights.after(done), largest.after(done), new_scores.after(done), done
        )

    def _result(self, e: UOp, new: _NewToken, totals: _Totals) -> list[UOp]:
        """The stores of an element of the block's result, with the new token."""
        h, warps, lists = self.heads, self.split.warps, self.split.warps * 4
        head, d = (e // self.width).minimum(self.group - 1), e % self.width
        new_score = f32(LOWEST)
        if self.has_new:
            own_score = h.capped(tree(load_run(totals.new_scores, head * self.n_parts, self.n_parts)))
            new_score = self.is_first_part.where(own_score, new_score)
        tops = load_run(totals.tops, head * warps, warps)
        top = maximum([new_score, *tops])
        new_weight, factors = (new_score - top).exp2(), [(x - top).exp2() for x in tops]
        sums = [load(totals.values, e + k * self.n_elements) for k in range(warps)]
        total = tree([x * f for x, f in zip(sums, factors, strict=True)])
        weights = [tree(load_run(totals.weights, head * lists + 4 * k, 4)) for k in range(warps)]
        weight = tree([x * f for x, f in zip(weights, factors, strict=True)]) + new_weight
        if self.has_new:
            total = total + new_weight * load(new.value, d).cast(F16).cast(F32)
        element = (self.first_head + head) * h.dim + self.run * self.width + d
        sink = None if new.sinks is None else load(new.sinks.after(new.ready, totals.done), head)
        gate = None if new.gates is None else load(new.gates.after(new.ready, totals.done), e)
        is_first = d.eq(0) & self.run.eq(0)
        return self.store_result(element, head, is_first, (total, weight, top), new.input_scale, sink, gate)


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
