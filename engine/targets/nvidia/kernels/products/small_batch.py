"""A quantized matrix times the activations of a few tokens at once, on tensor cores: for conversations that decode
together, and for short prompts.

The weights are read once for all tokens, and their bytes are what the time goes to. The matrix is the left operand of
mma.m16n8k16 (see `matmul`), and the tokens are the eight columns of the right one: so 2 to 8 tokens cost no more than
one tile, 9 to 16 take two, 17 to 32 four, and 33 to 64 eight.

A warp works on 16 rows and four units at a time. Thread 4g + t has unit t of rows g and g + 8, so that the threads of a
row load neighbouring 16 bytes, and the scales of a thread's weights are those of one unit. Sixteen instructions take
four of its 64 columns each. Activations lie in the order in which threads hold them (`column_index`): a thread loads 16
bytes at a time, its warp 512 neighbouring ones.

The warps of a block share its rows: each takes every `parts`-th step of four units, and their sums meet in shared
memory. There a `SmallBatchEpilogue` takes them. If these are too few blocks, `splits` of them share the columns too,
and what adds the product to something adds their sums.

What bounds it is not only memory: four instructions for each weight would take as long as its bytes, so weights are
converted two at a time (`half_pairs`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel, Name, call_by_name
from engine.kernels.launch_hints import Release, shared_hints
from engine.targets.nvidia.kernels.device import Chip, spills_early
from engine.targets.nvidia.kernels.products.epilogues import LOWEST_LOGIT, argmax, comparable
from engine.targets.nvidia.kernels.products.load_ahead import LoadedAhead
from engine.targets.nvidia.kernels.products.matmul import as_half, wmma
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.uops import (
    I32,
    Activation,
    f32,
    finish,
    gated,
    load,
    load_run,
    shared,
    soft_capped,
    store,
    store_run,
    tree,
    within,
    zeroed_registers,
)
from engine.targets.nvidia.kernels.weights.half_pairs import Pair, quarter_pairs, unit_pairs
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

MAX_TOKENS = 64
_TILE, _ROWS, _ABREAST = 8, 16, 4  # tokens and rows of a tile; units that a warp works on at a time
_H200 = Chip("sm_90", 132, own_rates=H200)
_WARPS = 24  # so many on a multiprocessor read weights as fast as memory gives them
_CACHED = 0.3  # the time of a byte from the L2 cache beside a byte of weights
_SUMS_BYTES = 34 << 10  # of shared memory, which leaves some for an epilogue
_PARTS = 4  # warps that share the columns of 32 rows
_RUN = 8  # halves that a thread loads at once
_RELEASES_AT_MOST = 16
"""With so few tokens, blocks of the next kernel fit beside this one's. On an H200, steps of 4 and 8 rows of Qwen3 1.7B
take 3 % less time if they start early, and prompts of 64 tokens 2 % more."""


@dataclass(frozen=True)
class SmallBatchTiles:
    """How a product is divided: a warp has 16 * `rows` rows of the matrix; a block has `across` times as many, and
    `parts` warps share the columns of each. `splits` blocks divide the columns, and each stores its own sums. A step
    takes the columns of four units, or of `slices`, 2 or 4, one: then it takes fewer registers."""

    rows: int
    across: int
    parts: int
    splits: int = 1
    slices: int = 1

    @property
    def width(self) -> int:
        """Rows of a block."""
        return _ROWS * self.rows * self.across

    @property
    def threads(self) -> int:
        return 32 * self.across * self.parts


@functools.cache
def small_batch_tiles(
    layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, divided: bool = False
) -> SmallBatchTiles:
    """Tiles for a matrix of any shape, as was fastest on an H200. For more than 16 tokens there is a block for every 32
    rows. If these are few blocks, the columns are `divided` among more, if the product may leave several sums, or else
    there are blocks of 16 rows. For fewer tokens, and for small matrices, the columns are divided where that takes
    least time by an estimate (`_cost`). The fewer blocks there are, the more warps share the columns of each."""
    columns, steps = -(-tokens // _TILE), steps_of(cols)
    blocks, full = -(-rows // (2 * _ROWS)), 2 * chip.multiprocessors
    if divided and (columns <= 2 or blocks * (steps // _PARTS) < chip.multiprocessors):
        candidates = [
            SmallBatchTiles(tile_rows, across, parts, splits=splits)
            for tile_rows in ((1, 2) if 1 < columns <= (4 if spills_early() else 8) else (1,))
            for across in (1, 2, 3, 4, 6)
            for parts in (1, 2, 3, 4, 6, 8, 12, 16)
            for splits in (1, 2, 3, 4, 6, 8)
            if parts * splits <= steps and across * parts <= 16
        ]
        fits = [t for t in candidates if t.parts * t.width * (columns * _TILE + 1) * 4 <= _SUMS_BYTES]
        bytes_of_row = layout.n_bytes(rows, cols) / rows
        return min(fits, key=lambda t: _cost(t, tokens, rows, cols, bytes_of_row, chip))
    if divided or columns > 4 or (columns > 2 and blocks >= full):
        parts = _divisor(steps, min(steps, _PARTS))
        if spills_early():  # registers, if warps take different numbers of steps
            parts = math.gcd(steps, _PARTS)
        across = _PARTS // parts if parts < steps else 1
        blocks = -(-rows // (2 * across * _ROWS))
        splits = max(1, min(full // blocks, steps // parts, 8)) if divided else 1
        return SmallBatchTiles(2, across, parts, splits=splits, slices=_slices(layout) if columns > 4 else 1)
    blocks = -(-rows // _ROWS)
    most = 16 if blocks <= full else 8 if blocks <= 8 * full else 4
    parts = _divisor(steps, min(steps, most))
    return SmallBatchTiles(1, max(1, 4 // parts), parts)


def _slices(layout: WeightLayout) -> int:
    """The slices of steps of 32 rows and 64 tokens: of types whose registers spill otherwise, if that is faster (as
    measured on an H200). Each slice loads the scales of a unit again."""
    if spills_early():
        return 4
    if layout.has_codes or layout.bits == 16 or (layout.is_e2m1 and layout.group == QUARTER):
        return 2
    return 4 if layout.bits in (5, 32) else 1


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n from most / 2 to `most`, or `most` if there is none."""
    return next((d for d in range(most, most // 2, -1) if n % d == 0), most)


def _cost(
    tiles: SmallBatchTiles, tokens: int, rows: int, cols: int, bytes_of_row: float, chip: Chip
) -> float:
    """An estimate of a product's time, in bytes of weights that a multiprocessor reads in it. It agrees with what was
    measured on an H200 where enough warps read weights at full speed, where too few do, and where each block reads all
    activations from the L2 cache. The norm of a token, on one multiprocessor, reads all sums."""
    columns, steps = -(-tokens // _TILE), steps_of(cols)
    multiprocessors, enough = chip.multiprocessors, _WARPS * _under_way(chip) / _under_way(_H200)
    registers = min(255, 20 + 40 * tiles.rows + columns * (10 + 8 * tiles.rows))
    warps = tiles.across * tiles.parts
    resident = max(1, min(64, 65536 // (32 * registers)) // warps)
    turns = tiles.parts * tiles.splits
    block_bytes = tiles.width * bytes_of_row * -(-steps // turns) * tiles.parts / steps
    blocks = n_blocks(rows, tiles)
    rounds, rest = divmod(-(-blocks * tiles.splits // multiprocessors), resident)
    cost = sum(
        times * block_bytes * max(together, enough / warps)
        for together, times in ((resident, rounds), (rest, 1 if rest else 0))
    )
    return cost + _CACHED * (blocks * tokens * cols * 2 / multiprocessors + tiles.splits * rows * 4)


def _under_way(chip: Chip) -> float:
    """Kilobytes that each multiprocessor must have asked for, so that the memory is never idle."""
    return chip.rates.copy_gbps * chip.rates.latency_us / chip.multiprocessors


def steps_of(cols: int) -> int:
    """Steps of four units in a row."""
    return -(-units_of(cols) // _ABREAST)


def column_index(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an activation, which are [8 tokens, step of four units, eight columns of each unit, thread, and
    of these columns the `PAIRS`]."""
    step, unit, run = column // (UNIT * _ABREAST), column // UNIT % _ABREAST, column % UNIT // _RUN
    thread = token % _TILE * _ABREAST + unit
    place = (token // _TILE * steps_of(cols) + step) * (UNIT // _RUN) + run
    return (place * 32 + thread) * _RUN + column % 4 * 2 + column % _RUN // 4


def columns_size(tokens: int, cols: int) -> int:
    """Elements of the activations (tokens, cols) of a product. Those of no token and no column are zeros."""
    return -(-tokens // _TILE) * _TILE * steps_of(cols) * _ABREAST * UNIT


@dataclass(frozen=True)
class BlockSums:
    """The sums of a block: `width` rows from `first` on, of `rows` in all, for each of `tokens` tokens. `thread` is the
    number of the current one of `threads`, `block` the block's, and `split` says which share of the columns it has."""

    width: int
    tokens: int
    rows: int
    threads: int
    first: UOp
    block: UOp
    split: UOp
    thread: UOp
    sum: Callable[[UOp, UOp], UOp]

    def shares(self, rows: int = 1) -> Iterator[tuple[UOp, UOp, UOp]]:
        """The sums of this thread, in runs of `rows`: (the first row in the block, the token, whether there are
        such)."""
        runs = self.width // rows
        for start in range(0, runs * self.tokens, self.threads):
            item = self.thread + start
            row, token = item % runs * rows, item // runs
            ok = (token < self.tokens) & (self.first + row < self.rows)
            yield row, token.minimum(self.tokens - 1), ok


@dataclass(frozen=True)
class SmallBatchEpilogue:
    """As `epilogues.SmallBatchEpilogue`; `stores` takes the block's sums first."""

    outs: tuple[Name, ...]
    ins: tuple[Name, ...]
    stores: Callable[..., list[UOp]]


@functools.cache
def stored(stride: int, offset: int = 0, has_bias: bool = False, limit: float = 0.0) -> SmallBatchEpilogue:
    """out[split, token, offset + row] = sum, or if it `has_bias` sum + bias[offset + row], cut to -limit to limit if
    there is one. outs: out, float32 (splits, tokens, stride); ins: bias, float32 (stride,)."""

    def stores(sums: BlockSums, out: UOp, bias: UOp | None) -> list[UOp]:
        results = []
        for i, token, ok in sums.shares():
            row, value = sums.first + i + offset, sums.sum(i, token)
            if bias is not None:
                value = value + load(bias, row, ok)
            place = (sums.split * sums.tokens + token) * stride + row
            results.append(store(out, place, within(value, limit), ok))
        return results

    return SmallBatchEpilogue(("out",), (has_bias and "bias",), stores)


@functools.cache
def activated(activation: Activation) -> SmallBatchEpilogue:
    """activation(gate) * up, from rows that alternate between gate and up. outs: out, the activations of the next
    product, float16 (columns_size(tokens, rows / 2),)."""

    def stores(sums: BlockSums, out: UOp) -> list[UOp]:
        results = []
        for i, token, ok in sums.shares(2):
            value = as_half(gated(sums.sum(i, token), sums.sum(i + 1, token), activation))
            index = column_index(token, (sums.first + i) // 2, sums.rows // 2)
            results.append(store(out, index, value, ok))
        return results

    return SmallBatchEpilogue(("out",), (), stores)


@functools.cache
def as_logits(softcap: float = 0.0, has_bias: bool = False) -> SmallBatchEpilogue:
    """Stores logits, with a soft cap if there is one, and the largest of each token and block, without it, with its
    row. outs: logits, float32 (tokens, rows); largest, float32 (tokens, blocks); largest_rows, int32 (tokens,
    blocks); ins: bias, which is added to the product, float32 (rows,), if it `has_bias`."""

    def stores(sums: BlockSums, logits: UOp, largest: UOp, largest_rows: UOp, bias: UOp | None) -> list[UOp]:
        stride = sums.width + 1
        values, results, kept = shared(sums.tokens * stride, slot=2), [], []
        for i, token, ok in sums.shares():
            value = sums.sum(i, token)
            if bias is not None:
                value = value + load(bias, sums.first + i, ok)
            capped = soft_capped(value, softcap)
            results.append(store(logits, token * sums.rows + sums.first + i, capped, ok))
            masked = (sums.first + i < sums.rows).where(comparable(value), f32(LOWEST_LOGIT))
            kept.append(store(values, token * stride + i, masked))
        values, token = values.after(UOp.group(*kept)), sums.thread.minimum(sums.tokens - 1)
        best, row = argmax([(load(values, token * stride + i), UOp.const(i, I32)) for i in range(sums.width)])
        blocks = -(-sums.rows // sums.width)
        index, ok = token * blocks + sums.block, sums.thread < sums.tokens
        results.append(store(largest, index, best, ok))
        results.append(store(largest_rows, index, row + sums.first.cast(I32), ok))
        return results

    return SmallBatchEpilogue(("logits", "largest", "largest_rows"), (has_bias and "bias",), stores)


def n_blocks(rows: int, tiles: SmallBatchTiles) -> int:
    """Blocks of a product."""
    return -(-rows // tiles.width)


def multiply(sums: list[UOp], tile: int, sides: Sequence[list[Pair]], rights: Sequence[list[UOp]]) -> None:
    """Adds to a thread's `sums`, [tile of sixteen rows, tile of eight columns, 4], the products of a tile of rows with
    all columns. `sides`: the weights of its rows g and g + 8. `rights`: the activations of each tile of columns."""
    columns = len(rights)
    for k in range(0, len(rights[0]), 4):
        left = [v for i in (0, 1) for side in sides for v in side[k // 2 + i]]
        for c in range(columns):
            i = (tile * columns + c) * 4
            sums[i : i + 4] = wmma(left, rights[c][k : k + 4], sums[i : i + 4])


def sums_of_parts(
    acc: UOp, tiles: SmallBatchTiles, columns: int, part: UOp, across: UOp, lane: UOp
) -> Callable[[UOp, UOp], UOp]:
    """What gives the sum of a row and a column of a block from those of its parts, which the warps store to shared
    memory. `acc`: a thread's, as in `multiply`, when the product is done."""
    g, t, padded = lane // _ABREAST, lane % _ABREAST, columns * _TILE + 1
    partial, stores = shared(tiles.parts * tiles.width * padded, slot=1), []
    for r in range(tiles.rows):
        for c in range(columns):
            for i, value in enumerate(load_run(acc, (r * columns + c) * 4, 4)):
                row = (across * tiles.rows + r) * _ROWS + i // 2 * 8 + g
                index = (part * tiles.width + row) * padded + c * _TILE + t * 2 + i % 2
                stores.append(store(partial, index, value))
    partial = partial.after(UOp.group(*stores))

    def total(row: UOp, column: UOp) -> UOp:
        return tree([load(partial, (p * tiles.width + row) * padded + column) for p in range(tiles.parts)])

    return total


@dataclass(frozen=True)
class _Rows:
    """The rows of a matrix of a thread, `places`, of which it reads every fourth unit, from the `thread`-th on, and if
    there are several `slices`, a part of each quarter of it at a time. `end`: the number of the matrix's rows, if a
    place may be beyond; else 0."""

    layout: WeightLayout
    planes: Sequence[UOp]
    units: int
    end: int
    places: Sequence[UOp]
    thread: UOp
    slices: int

    @property
    def _quarters(self) -> int:
        """How many quarters a slice of a unit has."""
        return UNIT // QUARTER // self.slices

    def fetch(self, step: UOp, nth: UOp) -> list[list[UOp]]:
        """The weights of a step, of each row, and if it has slices, of each quarter of the nth."""
        unit = step * _ABREAST + self.thread
        if self.units % _ABREAST:  # a thread beyond the row multiplies some weights by zeros
            unit = unit.minimum(self.units - 1)
        found = []
        for place in self.places:
            row = place.minimum(self.end - 1) if self.end else place
            if self.slices == 1:
                found.append(self.layout.load_words(self.planes, row, self.units, unit))
            for i in range(self._quarters if self.slices > 1 else 0):
                quarter = nth * self._quarters + i
                found.append(self.layout.load_quarter(self.planes, row, self.units, unit, quarter))
        return found

    def pairs(self, loaded: Sequence[list[UOp]], number: int, nth: UOp) -> list[Pair]:
        """The weights of a row, from what was fetched."""
        if self.slices == 1:
            return unit_pairs(self.layout.unit_of(loaded[number]))
        parts = enumerate(loaded[number * self._quarters :][: self._quarters])
        return [pair for i, q in parts for pair in quarter_pairs(self.layout, q, nth * self._quarters + i)]


@functools.cache
def small_batch_product(
    layout: WeightLayout,
    tokens: int,
    rows: int,
    cols: int,
    tiles: SmallBatchTiles,
    epilogue: SmallBatchEpilogue,
    name: str,
) -> Kernel:
    """activations @ matrix.T, of up to `MAX_TOKENS` tokens. Buffers: the epilogue's outs; x, the activations,
    float16 (columns_size(tokens, cols),); the epilogue's ins; the matrix's planes."""
    units, steps, columns = units_of(cols), steps_of(cols), -(-tokens // _TILE)
    assert 0 < tokens <= MAX_TOKENS and tiles.threads <= 1024 and tiles.parts * tiles.splits <= steps
    # Few warps wait for memory at a time if they have many rows. Of whole units with more than 32 tokens, and of
    # floats, there are no registers for it.
    loads_ahead = (
        tiles.rows > 1
        and (steps > tiles.parts * tiles.splits or tiles.slices > 1)
        and (tiles.slices > 1 or (layout.format is not None and columns <= 4))
    )
    slices = tiles.slices
    runs_a_step = UNIT // _RUN // slices
    n_acc = tiles.rows * columns * 4

    def kernel(x: UOp, planes: Sequence[UOp], **others: UOp | list[UOp]) -> UOp:
        lane, across = UOp.special(32, "lidx0"), UOp.special(tiles.across, "lidx1")
        part, block = UOp.special(tiles.parts, "lidx2"), UOp.special(n_blocks(rows, tiles), "gidx0")
        g, t = lane // _ABREAST, lane % _ABREAST
        split = UOp.special(tiles.splits, "gidx1") if tiles.splits > 1 else UOp.const(0)
        first = block * tiles.width
        acc = zeroed_registers(n_acc, 0)
        turns = tiles.parts * tiles.splits
        own = split * tiles.parts + part
        trips = (steps - own + (turns - 1)) // turns if steps % turns else steps // turns
        loops = steps > turns or steps % turns > 0 or slices > 1
        loop = UOp.range(trips * slices, 0, AxisType.REDUCE) if loops else UOp.const(0)

        def place_of(turn: UOp) -> tuple[UOp, UOp]:
            """The step of four units at a turn of the loop, and which slice of it."""
            return (turn // slices * turns + own, turn % slices) if slices > 1 else (turn * turns + own, turn)

        of_tiles = itertools.product(range(tiles.rows), (0, 1))
        places = [first + (across * tiles.rows + r) * _ROWS + side * 8 + g for r, side in of_tiles]
        own_rows = _Rows(layout, planes, units, rows if rows % tiles.width else 0, places, t, slices)
        step, nth = place_of(loop)
        sums = load_run(acc.after(loop) if loops else acc, 0, n_acc)
        ahead = LoadedAhead(own_rows.fetch(own, UOp.const(0)), slot=3) if loads_ahead else None
        loaded = ahead.of(loop) if ahead else own_rows.fetch(step, nth)
        rights = []
        for c in range(columns):
            runs = [(c * steps + step) * (UNIT // _RUN) + i for i in range(runs_a_step)]
            if slices > 1:
                runs = [run + nth * runs_a_step for run in runs]
            rights.append([v for run in runs for v in load_run(x, (run * 32 + lane) * _RUN, _RUN)])
        for r in range(tiles.rows):
            sides = [own_rows.pairs(loaded, side, nth) for side in (2 * r, 2 * r + 1)]
            multiply(sums, r, sides, rights)
        so_far = UOp.group(*store_run(acc, 0, sums))
        if ahead:
            following, following_slice = place_of(loop + 1)
            so_far = ahead.keep(own_rows.fetch(following.minimum(steps - 1), following_slice), so_far)
        acc = acc.after(so_far.end(loop) if loops else so_far)
        total = sums_of_parts(acc, tiles, columns, part, across, lane)
        thread = (part * tiles.across + across) * 32 + lane
        block_sums = BlockSums(tiles.width, tokens, rows, tiles.threads, first, block, split, thread, total)
        shape = f"{tiles.rows}_{tiles.across}_{tiles.parts}_{tiles.splits}"
        shape += f"_{slices}" if slices > 1 else ""
        full_name = f"few_{name}_{layout.name}_{tokens}_{rows}x{cols}_{shape}"
        n_bytes = layout.n_bytes(rows, cols) + 2 * tokens * cols
        stores = call_by_name(epilogue.stores, others, block_sums)
        return finish(full_name, stores, n_bytes, 2 * tokens * rows * cols)

    waits_for = tuple(name for name in (*epilogue.outs, "x", *epilogue.ins) if isinstance(name, str))
    releases: Release = "before its first barrier" if tokens <= _RELEASES_AT_MOST else "at its end"
    shared_bytes = tiles.parts * tiles.width * (columns * _TILE + 1) * 4
    hints = shared_hints(shared_bytes, waits_for, releases)
    ins = "x", *epilogue.ins, ("planes", len(layout.shapes(rows, cols)))
    return Kernel(kernel, epilogue.outs, ins, hints)
