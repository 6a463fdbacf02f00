"""Causal attention of pieces of prompts on tensor cores, in one pass over the cache.

A block has queries of neighbouring tokens and of all heads that share keys. Its warps go over the keys together, some
at a time: a step. Keys and values come from the cache once for all of them, into shared memory, in the order in which
threads hold operands of tensor cores, so that a warp loads sixteen bytes a thread without conflicts. There is room for
two steps: while one step's keys and values are used, those of the next are on their way. Where large heads leave room
for one, the next ones are loaded when all warps are done with it.

Scores, weights and weighted sums stay in registers (`attention_sums`).

If there are too few queries for all multiprocessors, several blocks share the keys of the same queries, and
`combine_prompt` adds their sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel, Name
from engine.kernels.launch_hints import shared_hints
from engine.targets.nvidia.kernels.attention.attention_sums import LEAST_TOTAL, AttentionSums, step_scores
from engine.targets.nvidia.kernels.attention.cache_tiles import STORAGES
from engine.targets.nvidia.kernels.attention.kv_cache import Heads, Pages
from engine.targets.nvidia.kernels.attention.prompt_tiling import PromptTiling
from engine.targets.nvidia.kernels.half_words import unknown
from engine.targets.nvidia.kernels.pieces import Piece
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.eights import RUN, Gathered, place_in_runs
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    LOG2_E,
    LOWEST,
    all_of,
    chain,
    f32,
    finish,
    load,
    load_run,
    maximum,
    registers,
    shared,
    store,
    store_run,
)

_MAX_WARPS = 32  # of a block
_ADDED_AT_ONCE = 8  # splits: a thread has no registers for the sums of many more
_RESULT_SLOT = 8  # of the shared memory for these


def query_index(heads: Heads, tokens: int, head: UOp, token: UOp, d: UOp) -> UOp:
    """The index of an element of the queries, which are [head, 16 tokens, 16 dimensions, thread, element]: a left tile
    of tensor cores. Thread 4g + t has the t-th four dimensions of tokens g and g + 8."""
    thread, i = token % 8 * 4 + d % 16 // 4, d % 4
    element = i // 2 * 4 + token % 16 // 8 * 2 + i % 2
    return (((head * (tokens // 16) + token // 16) * (heads.dim // 16) + d // 16) * 32 + thread) * 8 + element


class _Tiles:
    """The keys and values of two steps in shared memory, and how threads copy them there."""

    def __init__(self, heads: Heads, tiling: PromptTiling, cache: Sequence[UOp], kv: UOp, warp: UOp, thread: UOp,
                 pages: Pages) -> None:  # fmt: skip
        self._heads, self._steps, self._cache, self._kv, self._pages = heads, tiling.steps, cache, kv, pages
        self._held = tiling.held
        self._chunks = heads.dim // 16
        pieces = tiling.steps * self._chunks  # of 512 bytes
        numbers = [warp + k * tiling.warps for k in range(-(-pieces // tiling.warps))]
        self._pieces = [n.minimum(pieces - 1) if pieces % tiling.warps else n for n in numbers]
        self._size = pieces * 256  # elements of the keys of a step, or of its values
        self._t, self._g = thread // 8, thread % 8  # so that neighbouring threads load neighbouring bytes
        self._read_place = self._place(thread % 4, thread // 4)
        self.array = shared(2 * tiling.held * self._size, 0, F16)

    @staticmethod
    def _place(t: UOp, g: UOp) -> UOp:
        """Where the eight elements of thread 4g + t are, so that eight threads that load or store at once meet no
        conflict."""
        return (t * 8 + (g + 2 * t) % 8) * 8

    def from_cache(self, step: UOp, *after: UOp) -> list[UOp]:
        """A thread's part of the keys and values of a step."""
        cache, loads = [plane.after(*after) if after else plane for plane in self._cache], []
        storage = STORAGES[self._heads.kv_format]
        for eight in (storage.eight_keys, storage.eight_values):
            for piece in self._pieces:
                number, c = step * self._steps + piece // self._chunks, piece % self._chunks
                tile = self._pages.tile(self._kv, number)
                loads += eight(self._heads, cache, tile, c, self._t, self._g)
        return loads

    def put(self, step: UOp, elements: Sequence[UOp], *after: UOp) -> UOp:
        """Stores what `from_cache` loaded."""
        array, stores = self.array.after(*after) if after else self.array, []
        for i in range(0, len(elements), 8):
            which, k = divmod(i // 8, len(self._pieces))
            first = self._first(step, which) + self._pieces[k] * 256 + self._place(self._t, self._g)
            stores += store_run(array, first, elements[i : i + 8])
        return UOp.group(*stores)

    def replace(self, step: UOp, used: Sequence[UOp]) -> UOp:
        """Loads and stores a step in place of the one before, when all warps have `used` that."""
        barrier = used[0].barrier(*used[1:])
        return self.put(step, self.from_cache(step, barrier), barrier)

    def _first(self, step: UOp, which: int) -> UOp:
        """Where the keys or the values of a step begin."""
        return (step % self._held * 2 + which) * self._size

    def operands(self, array: UOp, step: UOp, which: int, s: int, c: int | UOp) -> list[list[UOp]]:
        """Two right tiles: of keys (`which` is 0) or values, of the s-th sixteen tokens of a step, in sixteen
        dimensions: of even keys and odd ones, or of even dimensions and odd ones."""
        place = step % self._held * (self._size // 4) + self._read_place // 8  # in units of a load
        # Measured: with float16 heads of 64 elements it takes longer.
        if self._heads.dim > 64 or self._heads.kv_format.is_quantized:
            place = unknown(place)
        eight = load_run(array, place * 8 + which * self._size + (s * self._chunks + c) * 256, 8)
        return [eight[:4], eight[4:]]


def _before(array: UOp, elements: Sequence[UOp], *others: UOp) -> UOp:
    """The array after a barrier that the loads of `elements` come before. The compiler would put them off until
    their numbers are stored, which would wait for them."""
    loads = [u for u in UOp.sink(*elements).toposort() if u.op is Ops.LOAD]
    return array.after(*others, loads[0].barrier(*loads[1:]))


class _PromptBlock:
    """A block of attention of prompts. Thread 4g + t of a warp has queries of rows g and g + 8 of each of its tiles of
    sixteen tokens, from `tile` on, of `head`; of the values' dimensions it has the `run`-th part."""

    def __init__(
        self, heads: Heads, tokens: int, tiling: PromptTiling, cache: Sequence[UOp], tables: UOp, prompt: UOp,
        slopes: UOp | None, seen: UOp | None,
    ) -> None:  # fmt: skip
        h, rows, warps, across, per_block = heads, tiling.rows, tiling.warps, tiling.across, tiling.units
        self.heads, self.tokens, self.tiling = heads, tokens, tiling
        self.chunks = h.dim // 16
        self.own_chunks = self.chunks // across  # of the values of a warp
        units = h.shared_by * (tokens // (16 * rows))  # warps of a key head that have queries of their own
        blocks = -(-units // per_block)
        self.thread = UOp.special(32, "lidx0")
        warp = UOp.special(warps, "lidx1") if warps > 1 else UOp.const(0)
        block, kv = UOp.special(blocks, "gidx0"), UOp.special(h.kv, "gidx1")
        self.kv = kv
        self.split = UOp.special(tiling.splits, "gidx2") if tiling.splits > 1 else UOp.const(0)
        block = blocks - 1 - block  # the longest work starts first
        self.number, self.first_unit = warp * 32 + self.thread, block * per_block
        self.own_unit, self.run = (warp // across, warp % across) if across > 1 else (warp, UOp.const(0))
        unit, self.g, self.t = block * per_block + self.own_unit, self.thread // 4, self.thread % 4
        exists = unit < units
        if units % per_block:
            unit = unit.minimum(units - 1)
        self.head, self.tile = kv * h.shared_by + unit % h.shared_by, unit // h.shared_by * rows
        last_unit = (block * per_block + (per_block - 1)).minimum(units - 1)
        first, after = (u // h.shared_by * (16 * rows) for u in (block * per_block, last_unit + h.shared_by))
        self.piece = piece = Piece.of(prompt, first, tokens, h.length)
        self.turns = _step_ranges(h, piece, first, after, 16 * tiling.steps, self.split, tiling.splits)
        self.first_position = piece.position - piece.first  # of row 0, if it were the piece's
        rows_of = [(self.tile + i // 2) * 16 + 8 * (i % 2) + self.g for i in range(2 * rows)]
        reads = [load(seen, row) for row in rows_of] if seen is not None else []
        self.last_seen = [read.cast(self.first_position.dtype) - 1 for read in reads]
        self.slope = None if slopes is None else load(slopes, self.head) * f32(LOG2_E)
        pages = Pages.of(h, tables, prompt, piece.sequence_at)
        self.tiles = _Tiles(h, tiling, cache, kv, warp, self.thread, pages)
        self.live = piece.token(self.tile * 16) < piece.count
        if units % per_block:
            self.live = self.live & exists

    def attended(self, queries: UOp) -> tuple[list[UOp], list[UOp], list[UOp]]:
        """What all steps give (`AttentionSums.ends`)."""
        tiling, tiles, n = self.tiling, self.tiles, self.tiling.rows * self.chunks
        first_query = (self.head * (self.tokens // 16) + self.tile) * self.chunks
        rows = [  # of the warps that share queries, each copies every `across`-th sixteen dimensions
            load_run(queries, ((first_query + i + self.run) * 32 + self.thread) * 8, 8)
            for i in range(0, n, tiling.across)
        ]
        first_store = [tiles.put(self.turns[0][0], tiles.from_cache(self.turns[0][0]))]
        query_array = shared(tiling.units * n * 256, 1, F16) if tiling.shared else tiles.array
        own_queries = self.own_unit * (n * 256) + self.thread * 8
        if tiling.shared:
            for i, row in enumerate(rows):
                place = own_queries + (i * tiling.across + self.run) * 256
                first_store += store_run(query_array, place, row)
        ready = UOp.group(*first_store)
        array, query_array = tiles.array.after(ready), query_array.after(ready)
        running = AttentionSums(tiling.rows, tiling.steps, self.own_chunks, 2)
        done: tuple[UOp, ...] = ()
        for axis, (start, stop, masked) in enumerate(self.turns):
            loop = UOp.range(stop - start, axis, AxisType.LOOP)
            step, before = start + loop, (loop, *done)
            old = running.largest(*before)
            following = tiles.from_cache(step + 1) if tiling.held > 1 else []
            now = _before(array, following or old, *before)
            if tiling.shared:
                held = query_array.after(*before)
                rows = [load_run(held, own_queries + i * 256, 8) for i in range(n)]
            scores = self._scores(now, step, masked, rows)
            values = functools.partial(self._values, now, step)
            stores, sums = running.added(scores, old, values, self.g, self.t, *before)
            put = tiles.put(step + 1, following) if following else tiles.replace(step + 1, sums)
            done = (UOp.group(*stores, put).end(loop),)
        return running.ends(*done)

    def _values(self, array: UOp, step: UOp, s: int, c: int) -> list[list[UOp]]:
        """The operands of a warp's part of the values."""
        return self.tiles.operands(array, step, 1, s, self.run * self.own_chunks + c)

    def _scores(
        self, array: UOp, step: UOp, masked: bool, queries: Sequence[Sequence[UOp]]
    ) -> list[list[UOp]]:
        """The scores of a step, as `step_scores` gives them."""
        keys = lambda s, c: self.tiles.operands(array, step, 0, s, c)
        shown = functools.partial(self._shown, step, masked)
        return step_scores(queries, keys, self.tiling.rows, self.tiling.steps, self.chunks, shown)

    def _shown(self, step: UOp, masked: bool, s: int, i: int, four: list[UOp]) -> list[UOp]:
        """The i-th row's scores of four neighbours of a step's s-th sixteen keys, capped and sloped; those that it does
        not see are the lowest, if some of the step are `masked`."""
        h = self.heads
        four = [h.capped(score) for score in four]
        if not masked and self.slope is None:
            return four
        r, side = divmod(i, 2)
        first_key = (step * self.tiling.steps + s) * 16 + self.t * 4
        own = self.first_position + (self.tile + r) * 16 + 8 * side + self.g
        ahead = own - first_key
        if self.slope is not None:
            four = [x - self.slope * (ahead - e).cast(F32) for e, x in enumerate(four)]
        if not masked:
            return four
        behind = self.last_seen[i] - first_key if self.last_seen else ahead
        sees = [behind >= e for e in range(4)]
        if h.window:
            most = own % h.window + 1 if h.chunked else h.window
            sees = [ok & (ahead < most + e) for e, ok in enumerate(sees)]
        return [ok.where(x, f32(LOWEST)) for ok, x in zip(sees, four, strict=True)]

    def sums_stores(
        self, out: UOp, r: int, sums: Sequence[UOp], total: Sequence[UOp], top: Sequence[UOp]
    ) -> list[UOp]:
        """Stores what `combine_prompt` adds up, of the r-th tile of queries."""
        index = _record(self.heads, self.tokens, self.split, self.head, self.tile + r) + self.thread * 4
        first, stores = index + self.run * (self.own_chunks * 256), list[UOp]()
        for i in range(0, len(sums), 4):
            stores += store_run(out, first + i * 32, sums[i : i + 4], self.live)
        ends = [total[0], top[0], total[1], top[1]]
        return stores + store_run(out, index + self.chunks * 256, ends, all_of(self.live, self.run.eq(0)))

    def result_stores(
        self, out: UOp, order: Order, r: int, sums: Sequence[UOp], total: Sequence[UOp], top: Sequence[UOp],
        sinks: UOp | None, gathered: Gathered | None,
    ) -> list[UOp]:  # fmt: skip
        """Stores the results of the r-th tile of queries, or gathers them."""
        h, stores = self.heads, list[UOp]()
        if sinks is not None:
            score = load(sinks, self.head) * f32(LOG2_E)
            total = [x + (score - b).exp2() for x, b in zip(total, top, strict=True)]
        factors = [x.maximum(LEAST_TOTAL).reciprocal() for x in total]
        for c in range(self.own_chunks):
            chunk, own = self.run * self.own_chunks + c, sums[8 * c : 8 * c + 8]
            results = _results(
                h, out, order, self.head, self.tile + r, chunk, self.thread, own, factors, self.live
            )
            if gathered is None:
                stores += [store(out, place, value, self.live) for place, value in results]
                continue
            head, tile = (
                self.own_unit % self.tiling.block_heads(h),
                self.own_unit // self.tiling.block_heads(h),
            )
            for (token, column), (_, value) in zip(
                _elements(h, head, tile * self.tiling.rows + r, chunk, self.thread), results, strict=True
            ):
                place = gathered.place(token, *place_in_runs(column, h.query * h.dim))
                stores.append(store(gathered.array, place, value))
        return stores

    def gathered_stores(self, out: UOp, gathered: Gathered, stores: Sequence[UOp]) -> list[UOp]:
        """Stores what the block's threads have gathered."""
        h, piece = self.heads, self.piece
        first_token = self.first_unit // h.shared_by * (16 * self.tiling.rows)
        first_head = self.kv * h.shared_by + self.first_unit % h.shared_by
        is_live = lambda token: piece.token(token // 16 * 16) < piece.count
        place = first_token, first_head * (h.dim // RUN), self.number, self.tiling.warps * 32
        return gathered.stores(out, h.query * h.dim, stores, *place, is_live)


@functools.cache
def attend_prompt(
    heads: Heads, tokens: int, tiling: PromptTiling, has_sinks: bool = False, order: Order = "fragments"
) -> Kernel:
    """Causal attention of prompts over the cache. Buffers: out, float16 (tokens, query heads * dim) in an
    `Order`, or with several splits the sums of each, float32 (`PromptTiling.sums_size`), and of gated heads it holds
    the factors of its elements; queries, those of `prefill.rotate_prompt`; cache (`Heads.cache_planes`); tables, those
    of blocks, int32 (sequences, `Heads.table_size`); prompt, the step's state (`pieces`), whose pieces begin at
    multiples of `PromptTiling.span`; slopes, float32 (query heads,), of sloped heads; seen, if heads look ahead, how
    many tokens that of each row sees, int32 (tokens,), at least those up to its own and at most those of its piece;
    sinks, if there are any, unless there are several splits, float32 (query heads,): a score of each head that is not
    scaled and weighs no value."""
    h, rows, across, splits = heads, tiling.rows, tiling.across, tiling.splits
    chunks = h.dim // 16
    assert h.dim % 16 == 0 and tokens % (16 * rows) == 0 and not (has_sinks and splits > 1)
    assert tiling.warps % across == 0 and chunks % across == 0 and (across == 1 or tiling.shared)
    gathered = tiling.gathered(h, tokens, _RESULT_SLOT) if order == "eights" else None

    def kernel(
        out: UOp, queries: UOp, cache: list[UOp], tables: UOp, prompt: UOp, slopes: UOp | None, seen: UOp | None,
        sinks: UOp | None,
    ) -> UOp:  # fmt: skip
        block = _PromptBlock(h, tokens, tiling, cache, tables, prompt, slopes, seen)
        sums, total, top = block.attended(queries)
        n, stores = len(sums) // rows, list[UOp]()
        for r in range(rows):
            ends = sums[r * n : (r + 1) * n], total[2 * r : 2 * r + 2], top[2 * r : 2 * r + 2]
            if splits > 1:
                stores += block.sums_stores(out, r, *ends)
            else:
                stores += block.result_stores(out, order, r, *ends, sinks, gathered)
        if gathered:
            stores = block.gathered_stores(out, gathered, stores)
        shape = f"{rows}_{tiling.warps}_{tiling.steps}_{splits}{'_across' * (across > 1)}{'_one' * (tiling.held == 1)}"
        if splits == 1:
            shape += f"{'_sinks' * has_sinks}{h.gate_name}_{order}"
        return finish(f"prefill_attend_{h.cache_name}_{tokens}_{shape}", stores)

    inputs: tuple[Name, ...] = (
        "queries",
        ("cache", len(h.cache_planes)),
        "tables",
        "prompt",
        h.sloped and "slopes",
        h.ahead and "seen",
    )
    n_bytes = tiling.shared_bytes(h.dim) + (gathered.n_bytes if gathered else 0)
    return Kernel(kernel, ("out",), (*inputs, has_sinks and "sinks"), shared_hints(n_bytes))


def _step_ranges(
    heads: Heads, piece: Piece, first_row: UOp, after_row: UOp, size: int, split: UOp, splits: int
) -> list[tuple[UOp, UOp, bool]]:
    """The steps of `size` keys that the queries of a piece's rows from `first_row` on and before `after_row` see, as
    far as they are the split's: each as the first, the one after the last, and whether there is a mask."""
    first, after = piece.token(first_row), piece.token(after_row)
    own, last = piece.position + first, piece.position + after - 1
    start = heads.first_seen(own) // size
    last_seen = piece.count if heads.ahead else after.minimum(piece.count)
    stop = ((piece.position + last_seen) + (size - 1)) // size
    stop = (first < piece.count).where(stop, start)
    if splits > 1:
        part = (stop - start + (splits - 1)) // splits
        start = (start + part * split).minimum(stop)
        stop = (start + part).minimum(stop)
    whole = ((own + 1) // size).maximum(start).minimum(stop)  # from here on some queries see some keys
    if not heads.window:
        return [(start, whole, False), (whole, stop, True)]
    left = ((heads.first_seen(last) + (size - 1)) // size).maximum(start).minimum(stop)
    whole = whole.maximum(left)
    return [(start, left, True), (left, whole, False), (whole, stop, True)]


def _record(heads: Heads, tokens: int, split: UOp | int, head: UOp, tile: UOp) -> UOp:
    """The index of a split's sums for sixteen queries: [16 values, four elements, thread, 4], and of the sums of
    weights and the largest scores of rows g and g + 8, [thread, 4]."""
    return ((split * heads.query + head) * (tokens // 16) + tile) * ((heads.dim + 8) * 16)


def _elements(h: Heads, head: UOp, tile: UOp, c: UOp, thread: UOp) -> list[tuple[UOp, UOp]]:
    """The token and the column of each of a thread's eight results of sixteen dimensions: four of either query."""
    column, token = head * h.dim + c * 16 + thread % 4 * 4, tile * 16 + thread // 4
    return [(token + 8 * side, column + e) for side in (0, 1) for e in range(4)]


def _results(
    h: Heads, out: UOp, order: Order, head: UOp, tile: UOp, c: UOp, thread: UOp, sums: Sequence[UOp],
    factors: Sequence[UOp], live: UOp,
) -> list[tuple[UOp, UOp]]:  # fmt: skip
    """A thread's results of sixteen dimensions, each with its place: its sums times the factors of its two queries."""
    values = [sums[e % 2 * 4 + 2 * side + e // 2] * factors[side] for side in (0, 1) for e in range(4)]
    places = [PLACES[order](*element, h.query * h.dim) for element in _elements(h, head, tile, c, thread)]
    if h.gated:
        gates = [load(out, place, live).cast(F32) for place in places]
        values = [value * gate for value, gate in zip(values, gates, strict=True)]
    return [(place, value.cast(F16)) for place, value in zip(places, values, strict=True)]


@functools.cache
def combine_prompt(
    heads: Heads, tokens: int, splits: int, has_sinks: bool = False, order: Order = "fragments"
) -> Kernel:
    """Adds the sums of several splits of `attend_prompt`. Buffers: out as there, with the factors; sums; prompt, the
    step's state; sinks, if there are any, float32 (query heads,)."""
    h, chunks = heads, heads.dim // 16
    own = next(n for n in range(_MAX_WARPS, 0, -1) if chunks % n == 0)

    def kernel(out: UOp, sums: UOp, prompt: UOp, sinks: UOp | None) -> UOp:
        thread, c = UOp.special(32, "lidx0"), UOp.special(own, "lidx1")
        if chunks > own:
            c = c + UOp.special(chunks // own, "gidx2") * own
        tile, head = UOp.special(tokens // 16, "gidx0"), UOp.special(h.query, "gidx1")
        piece = Piece.of(prompt, tile * 16, tokens, h.length)
        live = piece.token(tile * 16) < piece.count
        rounds = -(-splits // _ADDED_AT_ONCE)
        n = -(-splits // rounds)
        loop = UOp.range(rounds, 0, AxisType.LOOP) if rounds > 1 else UOp.const(0)
        kept = registers(12, 0)  # the largest scores, the sums of weights, and those of values
        kept = kept.after(UOp.group(*store_run(kept, 0, [f32(LOWEST)] * 2 + [f32(0)] * 10)))
        old = load_run(kept.after(loop) if rounds > 1 else kept, 0, 12)
        of_round = [loop * n + i for i in range(n)]
        firsts = [_record(h, tokens, s.minimum(splits - 1), head, tile) + thread * 4 for s in of_round]
        ends = [load_run(sums, first + chunks * 256, 4) for first in firsts]
        values = [
            load_run(sums, first + c * 256, 4) + load_run(sums, first + c * 256 + 128, 4) for first in firsts
        ]
        new: list[UOp] = [maximum([old[k], *(end[2 * k + 1] for end in ends)]) for k in (0, 1)]
        shrink = [(old[k] - new[k]).exp2() for k in (0, 1)]
        weights = [
            [(s < splits).where((end[2 * k + 1] - new[k]).exp2(), f32(0)) for k in (0, 1)]
            for s, end in zip(of_round, ends, strict=True)
        ]
        parts = [[end[0], end[2], *value] for end, value in zip(ends, values, strict=True)]
        for i, k in enumerate((0, 1, *(i % 4 // 2 for i in range(8)))):
            terms = (part[i] * w[k] for part, w in zip(parts, weights, strict=True))
            new.append(chain([old[2 + i] * shrink[k], *terms]))
        done = UOp.group(*store_run(kept, 0, new))
        found = load_run(kept.after(done.end(loop) if rounds > 1 else done), 0, 12)
        top, total, results = found[:2], found[2:4], found[4:]
        if sinks is not None:
            score = load(sinks, head) * f32(LOG2_E)
            total = [x + (score - b).exp2() for x, b in zip(total, top, strict=True)]
        factors = [x.maximum(LEAST_TOTAL).reciprocal() for x in total]
        placed = _results(h, out, order, head, tile, c, thread, results, factors, live)
        stores = [store(out, place, value, live) for place, value in placed]
        name = f"prefill_combine_{h.query}_{h.dim}_{tokens}_{splits}"
        name += f"{'_sinks' * has_sinks}{h.gate_name}_{order}"
        return finish(name, stores)

    return Kernel(kernel, ("out",), ("sums", "prompt", has_sinks and "sinks"))
