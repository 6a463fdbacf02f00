"""A matrix times the activations of many tokens, for prefill, by the products of warpgroups
(`engine.fixes.warpgroup_products`).

Rows of the matrix are the left operand, in registers. As in `matmul`, a thread loads sixteen columns of a row straight
from the planes in a step, and converts them; here of two neighbouring rows. Tokens are the right operand, which a block
copies to shared memory while it computes (`StagedTiles`), and which is read there once for 64 rows. Activations lie by
eight tokens, as the instruction reads them (`eights`).

The products go on by themselves. Meanwhile a thread waits for those of the step before, converts the weights of the
next step where that one had its own, and loads those of a later one. The loop's body has `depth` steps, so that each
has registers of its own: if weights under way were moved from one to another, each step would wait for them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.fixes import warpgroup_products
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import shared_hints
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.half_words import halves, rounded, word_of
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.eights import Gathered, eights_index
from engine.targets.nvidia.kernels.products.load_ahead import LoadedAhead
from engine.targets.nvidia.kernels.products.matmul import MAX_HALF, spread
from engine.targets.nvidia.kernels.products.staged_tiles import (
    READ_LATER,
    StagedTiles,
    staged_bytes,
)
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.uops import (
    U32,
    Activation,
    all_of,
    at,
    finish,
    gated,
    load_run,
    store,
    within,
    zeroed_registers,
)
from engine.targets.nvidia.kernels.weights.half_pairs import quarter_pairs
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

LEAST_TOKENS = 64
"""Products are of a multiple of so many tokens."""
_PART = 8  # the fewest steps of a part
_STEP_US = {
    (256, 1, 2): (0.97, 0.97),
    (128, 2, 1): (0.54, 0.75),
    (128, 1, 1): (0.34, 0.65),
    (64, 1, 1): (0.34, 0.55),
}
_REST_US = {**_STEP_US, (128, 1, 2): (0.66, 0.66)}
"""By the `tokens`, `tall` and `groups` of a block: the microseconds that a step takes a multiprocessor of an H200, and
that it takes at least; the second of the rows that a first launch leaves."""
_LAUNCH_US = 2.0  # what a second launch takes

Span = tuple[int, int]
"""Rows of a matrix: the first one, and the one after the last."""
StepTimes = Mapping[tuple[int, int, int], tuple[float, float]]


@dataclass(frozen=True)
class WarpgroupTiles:
    """How a product is divided: a block has `tokens` tokens and `tall` times 64 rows of the matrix for each of its
    `groups` of four warps; `parts` blocks, each of which stores its own sum, share the columns. A thread has weights of
    `depth` steps under way, an even number. `rest`: how the rows from one on are divided, in a launch of their own."""

    tokens: int
    tall: int
    groups: int
    parts: int
    depth: int = 2
    rest: tuple[int, WarpgroupTiles] | None = None

    @property
    def width(self) -> int:
        """Rows of the matrix of a block."""
        return warpgroup_products.ROWS * self.tall * self.groups

    def launches(self, rows: int) -> list[tuple[WarpgroupTiles, Span]]:
        """How the rows are divided, one launch after the other."""
        if self.rest is None:
            return [(self, (0, rows))]
        first, tiles = self.rest
        return [(replace(self, rest=None), (0, first)), (tiles, (first, rows))]

    def steps(self, units: int) -> int:
        """Steps of a part of a row of so many units, of which the last part may have fewer. At least two turns of the
        loop: tinygrad may put what is needed behind a loop of one turn into it."""
        return max(2, -(-units // (self.parts * self.depth))) * self.depth


def warpgroup_tiles(
    layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool
) -> WarpgroupTiles:
    """The tiles that take least time: of products, which multiprocessors have to do one after the other, and of memory
    for sums. Where the last round of large blocks has few of them, its rows may have a launch of smaller ones. A
    `paired` product's columns are not shared, because the activation needs the whole sums of gate and up."""
    units, rates = units_of(cols), chip.rates

    def rounds(tiles: WarpgroupTiles, rows: int) -> float:
        return tokens // tiles.tokens * -(-rows // tiles.width) * tiles.parts / chip.multiprocessors

    def microseconds(tiles: WarpgroupTiles, rows: int) -> float:
        of_block, at_least = _REST_US[tiles.tokens, tiles.tall, tiles.groups]
        step = max(math.ceil(rounds(tiles, rows)) * of_block, at_least)
        slower = H200.tensor_tflops / rates.tensor_tflops
        sums = (tiles.parts - 1) * tokens * rows * 8
        return tiles.steps(units) * step * slower + sums / rates.copy_gbps / 1e3

    def deep(tiles: WarpgroupTiles, rows: int) -> WarpgroupTiles:
        """The tiles with more loads under way, which take registers: of floats if as many rounds of blocks then fit at
        a time."""
        is_few, blocks = tiles.tokens == LEAST_TOKENS, rounds(tiles, rows)
        if tiles.tall * tiles.groups > 1:
            return tiles
        shallow, deeper = (replace(tiles, depth=depth) for depth in ((4, 8) if is_few else (2, 4)))
        if layout.bits != 16:
            return shallow if is_few or blocks > 2 else deeper
        fits = math.ceil(blocks / 2) == math.ceil(blocks / 3)
        return deeper if fits and deeper.steps(units) == shallow.steps(units) else shallow

    def best(rows: int, parts: Sequence[int], of_step: StepTimes) -> WarpgroupTiles:
        tiles = [deep(WarpgroupTiles(*shape, n), rows) for shape in shapes(of_step) for n in parts]
        sound = (t for t in tiles if (t.parts - 1) * t.steps(units) < units)
        return min(sound, key=lambda t: microseconds(t, rows))

    def shapes(of_step: StepTimes) -> list[tuple[int, int, int]]:
        found = [s for s in of_step if tokens % s[0] == 0 and (s[0] > LEAST_TOKENS or tokens == LEAST_TOKENS)]
        # Two tiles of floats would take too many registers.
        return [(n, tall, g) for n, tall, g in found if tall == 1 or layout.bits < 16]

    parts = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or not (paired or units < n * _PART)]
    whole = best(rows, parts, _STEP_US)
    found = [(microseconds(whole, rows), whole)]
    for tiles in (deep(WarpgroupTiles(*shape, 1), rows) for shape in shapes(_STEP_US)):
        first = math.floor(rounds(tiles, rows)) * chip.multiprocessors * tiles.tokens // tokens * tiles.width
        if 0 < first < rows:
            rest = best(rows - first, [1], _REST_US)
            of_two = microseconds(tiles, first) + _LAUNCH_US + microseconds(rest, rows - first)
            found.append((of_two, replace(tiles, rest=(first, rest))))
    return min(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Block:
    """Where a thread stores what a block has computed of `tokens` tokens and `rows` rows: those of its part before
    `end`, beyond which a block that is not `whole` has some, and tokens from the `token` on."""

    tokens: int
    rows: int
    end: int
    whole: bool
    token: UOp
    part: UOp
    lane: UOp


def stored(
    out: UOp, acc: UOp, first: int, n: int, row: UOp, block: Block, activation: Activation | None,
    index: Callable[[UOp, UOp, int], UOp],
) -> list[UOp]:  # fmt: skip
    """Stores a thread's n sums of 64 rows, elements of registers from the `first` on, of which two are of `row` and two
    of the next one for each eight tokens: as they are, or the products with an activation by an `index`."""
    sums, results = load_run(acc, first, n), []
    ok = None if block.whole else row < block.end
    inside = ok if block.rows % 2 == 0 else all_of(ok, row + 1 < block.rows)
    for i in range(n // 4):
        pairs = [sums[i * 4 + e :: 2][:2] for e in (0, 1)]
        tokens = [block.token + i * 8 + block.lane % 4 * 2 + e for e in (0, 1)]
        if activation:
            products = (gated(a, b, activation) for a, b in pairs)
            values = halves(rounded(*(within(product, MAX_HALF) for product in products)))
            places = [index(token, row // 2, block.rows // 2) for token in tokens]
            results += [store(out, *at, ok) for at in zip(places, values, strict=True)]
            continue
        for (a, b), token in zip(pairs, tokens, strict=True):
            place = (block.part * block.tokens + token) * block.rows + row
            results += [store(out, place, a, ok), store(out, place + 1, b, inside)]
    return results


@dataclass(frozen=True)
class _Rows:
    """The rows of a matrix of a thread: the first ones of two neighbours each. Rows from `end` on are not there, unless
    the block is `whole`. `thread`: that of four which share a row."""

    layout: WeightLayout
    units: int
    rows: Sequence[UOp]
    end: int
    whole: bool
    thread: UOp

    def _quarter(self, step: UOp) -> tuple[UOp, UOp]:
        return spread(step.minimum(self.units - 1), self.thread, self.units)

    def fetch(self, planes: Sequence[UOp], step: UOp) -> list[list[UOp]]:
        """The weights of a step, of each row."""
        rows = [row + k for row in self.rows for k in (0, 1)]
        rows = rows if self.whole else [row.minimum(self.end - 1) for row in rows]
        return [self.layout.load_quarter(planes, row, self.units, *self._quarter(step)) for row in rows]

    def words(self, loaded: Sequence[Sequence[UOp]], step: UOp, is_last: bool) -> list[list[UOp]]:
        """Words of pairs of weights of each row; zeros beyond the last step, which it may be if it `is_last`."""
        _, quarter = self._quarter(step)
        words = [[word_of(*pair) for pair in quarter_pairs(self.layout, own, quarter)] for own in loaded]
        if not is_last:
            return words
        return [[(step < self.units).where(word, UOp.const(0, U32)) for word in own] for own in words]


@functools.cache
def warpgroup_matmul(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: WarpgroupTiles, paired: bool, name: str,
    activation: Activation = "silu", span: Span | None = None,
) -> Kernel:  # fmt: skip
    """activations @ matrix.T. Buffers, as those of `matmul`: out; x, the activations by eight tokens, float16
    (fragments_size(tokens, cols),); prompt, the step's state (`pieces`); the matrix's planes. The output is a sum for
    each part, float32 (parts, tokens, rows). If the matrix's rows are `paired`, gate and up alternating, it is
    activation(gate) * up by eight tokens, float16 (fragments_size(tokens, rows / 2),)."""
    units, n, depth = units_of(cols), tiles.tokens, tiles.depth
    steps = tiles.steps(units)
    assert tokens % n == 0 and (tiles.parts - 1) * steps < units
    assert not (paired and (rows % 2 or tiles.parts > 1))
    n_sums = n // 2  # of a thread and 64 rows
    first, end = span or (0, rows)
    whole = (end - first) % tiles.width == 0
    gathered = _gathered(tiles, rows, (first, end), slot=depth + 2) if paired else None

    def kernel(out: UOp, x: UOp, prompt: UOp, planes: Sequence[UOp]) -> UOp:
        warps = warpgroup_products.WARPS * tiles.groups
        lane, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        blocks = -(-(end - first) // tiles.width)
        column_block, block = UOp.special(tokens // n, "gidx0"), UOp.special(blocks, "gidx1")
        part = UOp.special(tiles.parts, "gidx2") if tiles.parts > 1 else UOp.const(0)
        first_step, used = part * steps, used_rows(prompt, tokens)
        own_steps = (units - first_step).minimum(steps) if tiles.parts > 1 else UOp.const(steps)
        acc = zeroed_registers(n_sums * tiles.tall, 0)
        staged = StagedTiles(
            x, units, column_block * (n // 16), n // 16, warp * 32 + lane, 32 * warps, slot=depth + 1,
            buffers=READ_LATER,
        )  # fmt: skip

        slots = [(block * warps + warp) * tiles.tall + j for j in range(tiles.tall)]
        of_slots = [_row_of_runs(first // 16 + i, rows // 2) if gathered else first + i * 16 for i in slots]
        own = _Rows(layout, units, [row + lane // 4 * 2 for row in of_slots], end, whole, lane % 4)
        ahead = [LoadedAhead(own.fetch(planes, first_step + i), slot=i + 1) for i in range(depth)]
        effect = staged.begin_two(first_step)
        trips = (own_steps + (depth - 1)) // depth
        trip = UOp.range((column_block * n < used).where(trips, 0), 0, AxisType.REDUCE)
        following = []
        for i, weights in enumerate(ahead):
            turn = trip * depth + i
            step = first_step + turn
            # Products have taken the words of all steps but the one before.
            loaded = [[warpgroup_products.after(w, effect) for w in some] for some in weights.of(trip)]
            words = own.words(loaded, step, is_last=units % depth > 0 or steps > units)
            array, asked, place = staged.read_later(turn, step, effect, *itertools.chain(*words))
            following.append(own.fetch([plane.after(asked) for plane in planes], step + depth))
            latest = warpgroup_products.begun(asked, *itertools.chain(*words))
            for quad in range(4):
                for j in range(tiles.tall):
                    sums = [at(acc.after(trip), j * n_sums + e) for e in range(n_sums)]
                    left = [words[2 * j + k][quad * 2 + p] for p in (0, 1) for k in (0, 1)]
                    right = at(array, place + quad * warpgroup_products.DEPTH)
                    latest = warpgroup_products.added(sums, left, right, latest)
            effect = warpgroup_products.all_but(1, warpgroup_products.closed(latest))
        kept = [a.keep_after(some, effect) for a, some in zip(ahead, following, strict=True)]
        ended = warpgroup_products.all_but(0, UOp.group(*kept).end(trip))
        # tinygrad drops what is neither a barrier nor a store.
        acc = acc.after(UOp(Ops.BARRIER, src=(ended,)))
        of_block = Block(tokens, rows, end, whole, column_block * n, part, lane)
        if gathered:
            first_run = first // 16 + block * gathered.runs
            results = _gathered_stores(out, acc, gathered, tiles, of_block, warp, first_run, activation)
        else:
            places = [(j * n_sums, n_sums, row) for j, row in enumerate(own.rows)]
            of_rows = of_block, activation if paired else None, eights_index
            results = [one for place in places for one in stored(out, acc, *place, *of_rows)]
        shape = f"{tiles.tokens}_{tiles.tall}_{tiles.groups}_{tiles.parts}_{depth}"
        full_name = f"prefill_{name}_{layout.name}_{tokens}_{rows}x{cols}_groups_{shape}"
        full_name += f"_{first}_{end}" * (end - first < rows)
        return finish(full_name, results, layout.n_bytes(rows, cols), 2 * tokens * rows * cols)

    planes = "planes", len(layout.shapes(rows, cols))
    # Of few tokens it loads its first weights before it waits for the kernel before, which leaves room for that.
    waits_for = ("out", "x") if n == LEAST_TOKENS else ()
    n_bytes = staged_bytes(n // 16, READ_LATER) + (gathered.n_bytes if gathered else 0)
    return Kernel(kernel, ("out",), ("x", "prompt", planes), shared_hints(n_bytes, waits_for))


def _gathered(tiles: WarpgroupTiles, rows: int, span: Span, slot: int) -> Gathered | None:
    """How a block gathers gate and up's products, if its rows are whole runs of these: each warp has sixteen rows at a
    time, so eight activations, and four warps have four runs of a step (`_row_of_runs`)."""
    first, end = span
    if rows % (2 * UNIT) or first % warpgroup_products.ROWS or (end - first) % tiles.width:
        return None
    return Gathered(tiles.tokens, tiles.width // 16, slot)


def _row_of_runs(slot: UOp, cols: int) -> UOp:
    """The first of the sixteen rows of gate and up, alternating, that a warp has of the slot-th four runs' quarter."""
    unit, quarter = spread(slot // 8, slot % 4, units_of(cols))
    return (unit * UNIT + quarter * QUARTER + slot // 4 % 2 * 8) * 2


def _gathered_stores(
    out: UOp, acc: UOp, gathered: Gathered, tiles: WarpgroupTiles, block: Block, warp: UOp, first_run: UOp,
    activation: Activation,
) -> list[UOp]:  # fmt: skip
    """A thread's stores of what the block has gathered: the products of gate and up. It has one of each token for each
    sixteen rows of its warp."""
    n, stores, own = tiles.tokens // 2, list[UOp](), replace(block, token=UOp.const(0))
    for j in range(tiles.tall):
        slot = warp * tiles.tall + j
        run, place = slot // 4 * 4 + block.lane // 4 % 4, slot % 4 * 2 + block.lane // 16

        def index(token: UOp, column: UOp, cols: int, run: UOp = run, place: UOp = place) -> UOp:
            return gathered.place(token, run, place)

        stores += stored(gathered.array, acc, j * n, n, UOp.const(0), own, activation, index)
    threads = 32 * warpgroup_products.WARPS * tiles.groups
    thread = warp * 32 + block.lane
    return gathered.stores(out, block.rows // 2, stores, block.token, first_run, thread, threads)
