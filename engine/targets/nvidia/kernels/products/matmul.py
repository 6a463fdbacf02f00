"""A quantized matrix times the activations of many tokens, for prefill, on tensor cores.

The instruction mma.m16n8k16 (PTX ISA) multiplies a tile of 16 x 16 by one of 16 x 8, whose elements are spread over the
32 threads of a warp. Thread 4g + t holds four elements of rows g and g + 8 of the left tile, and four elements of
column g of the right tile. It does not matter which elements of the common dimension these are, as long as both sides
agree. Here thread t of a group of four holds a quarter of a unit, sixteen columns, in steps of four. So a thread loads
its part of the weights straight from their planes, sixteen columns of one row, and converts them to half precision in
registers. The four threads of a row have the same quarter of four units (`spread`), which are neighbours in the planes.
Quarters of one unit lie apart, and the L1 cache takes up to four times as long to load them. Activations are stored in
the order in which threads hold them, called fragments here (`fragment_index`), so that a thread loads 16 bytes at a
time.

Each warp has a tile of the product of its own. Where these are few, several warps of a block share the common
dimension of a tile, and their sums meet in shared memory.

In a mixture of experts each token takes some of the matrices, which are rows of one. A block has tokens of one expert
(`ExpertTiles`). They are not neighbours, so their activations are rows instead of fragments: the sixteen columns of a
thread, and those of the four threads of a step, are neighbours there (`activation_order`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import shared_hints
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.half_words import is_cuda
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.load_ahead import LoadedAhead
from engine.targets.nvidia.kernels.products.staged_tiles import StagedTiles, staged_bytes
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.uops import (
    F16,
    Activation,
    UngatedActivation,
    activated,
    chain,
    finish,
    gated,
    load,
    load_index,
    load_run,
    shared,
    store,
    store_run,
    zeroed_registers,
)
from engine.targets.nvidia.kernels.weights.half_pairs import PAIRS, quarter_pairs
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

_PART = 8  # the fewest units of a row in a part
_OF_SUM = (
    2.4e-4  # on an H200: time to store a sum and read it again, in that of a block's product with one column
)
MAX_HALF = 65504.0  # the largest float16


@dataclass(frozen=True)
class Tiles:
    """How a product is divided: a warp computes 16 * `rows` tokens by 8 * `cols` rows of the matrix; a block has
    `across` such tiles; `deep` warps of a block share the common dimension of each, and `parts` blocks, each of which
    stores its own sum. If activations are `staged`, the block copies them to shared memory (`StagedTiles`)."""

    rows: int
    cols: int
    across: int
    parts: int
    deep: int = 1
    staged: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return 16 * self.rows

    @property
    def width(self) -> int:
        """Rows of the matrix of a block."""
        return 8 * self.cols * self.across

    @property
    def shares(self) -> int:
        """Warps and blocks that share the common dimension."""
        return self.parts * self.deep

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        sums = (self.deep - 1) * self.tokens * self.width * 4
        return sums + staged_bytes(self.rows) * self.staged


@dataclass(frozen=True)
class ExpertTiles:
    """The assignments of `tokens` tokens to `used` of `n` experts each, sorted by expert (see
    `prefill_experts`): numbers token * used + slot, in tiles of `tile`, a multiple of 16. A tile is of one expert; -1
    fills the rest of the last tile of each."""

    tokens: int
    used: int
    n: int
    tile: int

    @property
    def assignments(self) -> int:
        return self.tokens * self.used

    @property
    def count(self) -> int:
        """The most tiles that the assignments take, whatever they are."""
        return (self.assignments + min(self.n, self.assignments) * (self.tile - 1)) // self.tile

    @property
    def size(self) -> int:
        """Places of assignments in all tiles."""
        return self.count * self.tile

    @property
    def tiles(self) -> Tiles:
        """How products are divided: a block for each tile and 64 rows."""
        return Tiles(self.tile // 16, 4, 2, 1)


def expert_tiles(tokens: int, used: int, n: int) -> ExpertTiles:
    """Tiles of up to twice as many tokens as an expert has on average: weights are converted to half precision once
    for a tile, which costs more than the empty half of an expert's last tile. Larger ones take more registers than
    they save time."""
    tile = next((t for t in (48, 32) if t * n <= 2 * tokens * used), 16)
    return ExpertTiles(tokens, used, n, tile)


def tiles_for(layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool) -> Tiles:
    """Tiles of a product. On CUDA, activations come through shared memory. Elsewhere there are two blocks for each
    multiprocessor, by dividing the common dimension if there are too few: among two warps of each, then among blocks.
    Not `paired` products among blocks, because the activation needs the whole sums of gate and up."""
    units = units_of(cols)
    # Tall tiles: a weight is converted to half precision once for 128 tokens.
    tall = min(8, tokens // 16)
    if is_cuda() and units > 1:
        tiles = _staged_tiles(tall, tokens, rows, cols, chip, paired)
        return replace(tiles, staged=not _is_better_alone(layout, tokens, rows, tiles, chip))
    tiles = Tiles(tall, 4, 2, 1)
    blocks, shares = -(-tokens // tiles.tokens) * -(-rows // tiles.width), 1
    while shares < 8 and blocks * shares < 2 * chip.multiprocessors and units // shares >= 8:
        shares *= 2
    deep = min(2, shares)
    return replace(tiles, parts=1 if paired else shares // deep, deep=deep)


def _staged_tiles(tall: int, tokens: int, rows: int, cols: int, chip: Chip, paired: bool) -> Tiles:
    """The tiles that leave the busiest multiprocessor least to do: blocks of 128 or 64 rows, of which some may share
    the columns. A multiprocessor works on two blocks of 128 rows at a time, and one alone takes as long as two. Sums
    cost the more, the faster its tensor cores are beside the memory."""
    units, rates = units_of(cols), chip.rates
    of_sum = _OF_SUM * (rates.tensor_tflops / H200.tensor_tflops) / (rates.copy_gbps / H200.copy_gbps)

    def time(tiles: Tiles) -> float:
        """The time of products and of memory for sums of further parts, in that of 128 rows and all columns."""
        blocks = -(-tokens // tiles.tokens) * -(-rows // tiles.width) * tiles.parts
        of_busiest = max(math.ceil(blocks / chip.multiprocessors), 8 // tiles.across)
        sums = (tiles.parts - 1) * of_sum * tokens * rows / cols
        return of_busiest * tiles.across / (4 * tiles.parts) + sums

    parts = [n for n in (1, 2, 4, 8) if n == 1 or not (paired or units < n * _PART)]
    return min((Tiles(tall, 4, across, n, staged=True) for n in parts for across in (4, 2)), key=time)


def _is_better_alone(layout: WeightLayout, tokens: int, rows: int, tiles: Tiles, chip: Chip) -> bool:
    """Whether the warps of a block had better load activations themselves. Types of few bits take most instructions and
    least memory. While warps wait for each other in each step, they all convert weights and then all multiply; with
    several rounds of blocks, that costs more than the copies save. Before 9.0, such kernels spill registers."""
    blocks = -(-tokens // tiles.tokens) * -(-rows // tiles.width)
    has_rounds = tiles.parts == 1 and blocks > 2 * chip.multiprocessors
    return layout.bits < 4 and has_rounds and chip.launches_early


def spread(unit: UOp, quarter: UOp, units: int) -> tuple[UOp, UOp]:
    """The step, and the thread of four, that take a quarter of a unit of a row of `units`. And the other way round: the
    unit and the quarter that a thread takes in a step. Four units take four steps, in each of which every thread has
    another unit; of the last units, which are fewer, the threads share each."""
    full = units // 4 * 4
    if not full:
        return unit, quarter
    other = unit // 4 * 4 + quarter, unit % 4
    if full == units:
        return other
    last = unit // full  # 1 for the last ones
    # The mask changes nothing: without it, tinygrad takes the quarter for one of up to 6.
    return other[0] + (unit - other[0]) * last, other[1] + (quarter - other[1]) * last & 3


def fragment_index(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an activation in fragments, which are [16 tokens, step, two `PAIRS` of columns of each quarter,
    thread, element]."""
    step, quarter = spread(column // UNIT, column % UNIT // QUARTER, units_of(cols))
    quad, i = column % QUARTER // 8 * 2 + column % 4 // 2, column % 2 * 2 + column % 8 // 4
    thread = token % 8 * 4 + quarter
    element = i // 2 * 4 + token % 16 // 8 * 2 + i % 2
    return (((token // 16 * units_of(cols) + step) * 4 + quad) * 32 + thread) * 8 + element


def fragments_size(tokens: int, cols: int) -> int:
    """Elements of the fragments of activations (tokens, cols)."""
    return tokens * units_of(cols) * UNIT


def as_half(value: UOp) -> UOp:
    """A float32 as float16, clamped to the largest one."""
    return value.maximum(-MAX_HALF).minimum(MAX_HALF).cast(F16)


def wmma(a: Sequence[UOp], b: Sequence[UOp], c: Sequence[UOp]) -> list[UOp]:
    """c + a @ b on tensor cores, from a thread's 8, 4 and 4 elements."""
    product = UOp.wmma(UOp.stack(*a), UOp.stack(*b), UOp.stack(*c), (8, 16, 16), "CUDA", 32)
    return [product.index(UOp.const(i)) for i in range(4)]


def _over_depths(tiles: Tiles, sums: Sequence[UOp], at: tuple[UOp, UOp, UOp]) -> list[UOp]:
    """The sums of a thread and of those at further depths, by way of shared memory. `at`: the thread of its warp, and
    the warp's place across and in the depth."""
    thread, across, depth = at
    tile, size = across * len(sums), tiles.across * len(sums)
    others = shared(tiles.shared_bytes // 4, slot=2)

    def met(depth: UOp | int, i: int) -> UOp:
        """Where the warp at a depth from 1 on leaves its i-th sum."""
        return ((depth - 1) * size + tile + i) * 32 + thread

    kept = [store(others, met(depth, i), value, depth > 0) for i, value in enumerate(sums)]
    others, depths = others.after(UOp.group(*kept)), range(1, tiles.deep)
    return [chain([v, *(load(others, met(d, i)) for d in depths)]) for i, v in enumerate(sums)]


class _Block:
    """A block of `matmul`: some rows of the matrix with some tokens, in left tiles of sixteen tokens from `first_tile`
    on and right tiles of eight rows from `first_row` on. Its warps lie `across` the rows; those of another `depth`,
    and blocks of another `part`, have other units of the same rows, from `first_unit` on."""

    def __init__(
        self, layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: Tiles, experts: ExpertTiles | None,
        prompt: UOp | None, assignments: UOp | None, tile_experts: UOp | None,
    ) -> None:  # fmt: skip
        self.layout, self.tokens, self.rows, self.tiles, self.experts = layout, tokens, rows, tiles, experts
        self.units, self.assignments = units_of(cols), assignments
        self.steps = -(-self.units // tiles.shares)
        self.thread, self.warp = UOp.special(32, "lidx0"), UOp.special(tiles.across * tiles.deep, "lidx1")
        self.across, self.depth = self.warp, UOp.const(0)
        if tiles.deep > 1:
            self.across, self.depth = self.warp % tiles.across, self.warp // tiles.across
        column_block = UOp.special(experts.count if experts else tokens // tiles.tokens, "gidx0")
        block = UOp.special(-(-rows // tiles.width), "gidx1")
        self.part = UOp.special(tiles.parts, "gidx2") if tiles.parts > 1 else UOp.const(0)
        self.first_tile = column_block * tiles.rows
        self.first_row = (block * tiles.across + self.across) * (8 * tiles.cols)
        self.first_unit = (self.part * tiles.deep + self.depth) * self.steps
        self.expert_row: UOp | None = None  # the first row of the expert
        if experts:
            assert tile_experts is not None
            self.live = load(tile_experts, column_block) >= 0
            self.expert_row = load_index(tile_experts, column_block, experts.n) * rows
        else:
            assert prompt is not None
            self.used = used_rows(prompt, tokens)
            self.live = self.first_tile * 16 < self.used

    def _fetch(self, planes: Sequence[UOp], unit: UOp) -> list[list[UOp]]:
        """This thread's weights of a step, of each right tile."""
        unit, quarter = spread(unit, self.thread % 4, self.units)
        quarters = []
        for j in range(self.tiles.cols):
            row = self.first_row + j * 8 + self.thread // 4
            if self.rows % self.tiles.width:
                row = row.minimum(self.rows - 1)
            row = row if self.expert_row is None else row + self.expert_row
            quarters.append(self.layout.load_quarter(planes, row, self.units, unit, quarter))
        return quarters

    def _place(self, i: int, k: int) -> UOp:
        """The token, or the place of the assignment, of row g or g + 8 of this thread in the i-th left tile."""
        return (self.first_tile + i) * 16 + self.thread // 4 + 8 * k

    def _assignment(self, place: UOp) -> UOp:
        assert self.experts and self.assignments is not None
        return load_index(self.assignments, place, self.experts.assignments)

    def _gathered(self, x: UOp, i: int, unit: UOp) -> list[list[UOp]]:
        """The i-th left tile's elements of a thread, for each quad, from the rows of two tokens."""
        sides = []
        for k in (0, 1):
            assert self.experts
            token = self._assignment(self._place(i, k)) // self.experts.used
            sides.append(load_run(x, ((token * self.units + unit) * 4 + self.thread % 4) * QUARTER, QUARTER))
        return [
            [side[q // 2 * 8 + c] for pair in PAIRS[q % 2 * 2 :][:2] for side in sides for c in pair]
            for q in range(4)
        ]

    def sums(self, x: UOp, planes: Sequence[UOp], gathers: bool) -> list[UOp]:
        """A thread's sums, [left tile, right tile, 4]. `gathers`: x has the rows of tokens, not fragments."""
        tiles, thread, steps = self.tiles, self.thread, self.steps
        acc = zeroed_registers(tiles.rows * tiles.cols * 4, 0)
        own_steps = UOp.const(steps)
        if self.units % tiles.shares:
            own_steps = (self.units - self.first_unit).minimum(steps)
        staged = None
        if tiles.staged:
            own_thread, threads = self.warp * 32 + thread, 32 * tiles.across
            staged = StagedTiles(x, self.units, self.first_tile, tiles.rows, own_thread, threads, slot=3)
            begun = staged.begin(self.first_unit)
        bound = self.live.where(own_steps, 0)  # warps beyond the prompt do nothing
        step = UOp.range(bound, 0, AxisType.REDUCE) if steps > 1 else UOp.const(0)
        unit = self.first_unit + step
        # Not of more bits, which would take too many registers, nor of experts, where it takes longer.
        loads_ahead = steps > 1 and self.layout.bits <= 16 and not self.experts
        ahead = LoadedAhead(self._fetch(planes, self.first_unit), slot=1) if loads_ahead else None
        so_far = acc.after(step) if steps > 1 else acc
        sums = [load_run(so_far, j * 4, 4) for j in range(tiles.rows * tiles.cols)]
        loaded = ahead.of(step) if ahead else self._fetch(planes, unit)
        _, quarter = spread(unit, thread % 4, self.units)
        weights = [quarter_pairs(self.layout, words, quarter) for words in loaded]
        lefts = [self._gathered(x, i, unit) for i in range(tiles.rows)] if gathers else []
        array = staged.of(step, unit, begun) if staged else x
        for quad in range(4):
            for i in range(tiles.rows):
                if staged:
                    left = staged.fragment(array, step, UOp.const(i), quad, thread)
                else:
                    index = ((((self.first_tile + i) * self.units + unit) * 4 + quad) * 32 + thread) * 8
                    left = lefts[i][quad] if gathers else load_run(x, index, 8)
                for j in range(tiles.cols):
                    k = i * tiles.cols + j
                    right = [v for pair in weights[j][quad * 2 : quad * 2 + 2] for v in pair]
                    sums[k] = wmma(left, right, sums[k])
        stores = UOp.group(*store_run(acc, 0, (x for four in sums for x in four)))
        if ahead:
            stores = ahead.keep(self._fetch(planes, (unit + 1).minimum(self.units - 1)), stores)
        acc = acc.after(stores.end(step) if steps > 1 else stores)
        total = load_run(acc, 0, tiles.rows * tiles.cols * 4)
        return _over_depths(tiles, total, (thread, self.across, self.depth)) if tiles.deep > 1 else total

    def pairs(self, sums: Sequence[UOp], bias: UOp | None) -> Iterator[tuple[UOp, UOp, UOp, list[UOp]]]:
        """The token, or the place of the assignment, the first of two neighbouring rows, whether both are there but for
        an odd row at the end, and their sums with the bias."""
        tiles = self.tiles
        for i, j, k in itertools.product(range(tiles.rows), range(tiles.cols), (0, 1)):
            pair = [*sums[(i * tiles.cols + j) * 4 + 2 * k :][:2]]
            place, row = self._place(i, k), self.first_row + j * 8 + self.thread % 4 * 2
            if self.experts:
                assert self.assignments is not None
                ok = self.live & (load(self.assignments, place) >= 0)
            else:
                ok = place < self.used if tiles.deep == 1 else (place < self.used) & self.depth.eq(0)
            if self.rows % tiles.width:
                ok = ok & (row < self.rows)
            if bias is not None:
                first = row if self.expert_row is None else self.expert_row + row
                pair = [v + term for v, term in zip(pair, load_run(bias, first, 2, ok), strict=True)]
            yield place, row, ok, pair

    def weighted(self, place: UOp, pair: Sequence[UOp], factors: UOp, ok: UOp) -> tuple[UOp, list[UOp]]:
        """The row of an assignment among the partial sums (used, tokens), and its sums times its factor."""
        assert self.experts
        assignment = self._assignment(place)
        row = assignment % self.experts.used * self.tokens + assignment // self.experts.used
        return row, [v * load(factors, assignment, ok) for v in pair]


@functools.cache
def matmul(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: Tiles, paired: bool, name: str,
    activation: Activation = "silu", experts: ExpertTiles | None = None, has_bias: bool = False,
    ungated: UngatedActivation | None = None, halved: bool = False,
) -> Kernel:  # fmt: skip
    """activations @ matrix.T. Buffers: out; x, the activations, float16 (fragments_size(tokens, cols),);
    prompt, the step's state (`pieces`); the matrix's planes. The output is a sum for each part, float32
    (parts, tokens, rows). If the matrix's rows are `paired`, gate and up alternating, it is activation(gate) * up
    as fragments, float16 (fragments_size(tokens, rows / 2),). If it is `ungated`, it is ungated(x + bias), float16
    (fragments_size(tokens, rows),); bias, if it `has_bias`, float32 (rows,).

    With `experts` the matrix has n * rows rows, and in place of the prompt are: assignments, int32 (experts.size,);
    tile_experts, the expert of each tile, int32 (experts.count,), -1 where there is none; unless it is `paired`,
    `halved` or `ungated`, factors, those of the assignments, float32 (tokens, used); if it `has_bias`, bias, float32
    (n, rows). A product that is `paired` or `ungated` is of the tokens' activations as rows, float16 (tokens,
    units_of(cols) * UNIT), and makes fragments of experts.size assignments; one `halved`, of gate or up alone, makes
    float32 (experts.size, rows) of the same, for `activate_assignments`. Others take such fragments, and make the
    partial sums that `norm_prompt` adds, one for each slot: float32 (used, tokens, rows), of which they write those of
    assignments."""
    units = units_of(cols)
    assert tiles.tokens == experts.tile if experts else tokens % tiles.tokens == 0
    assert tiles.shares == 1 and rows % 2 == 0 if experts else tiles.shares <= units
    assert tiles.parts == 1 if ungated else experts or not has_bias
    assert not tiles.staged or not (experts or tiles.deep > 1 or -(-units // tiles.shares) == 1)
    gathers = experts is not None and (paired or halved or bool(ungated))

    def kernel(
        out: UOp, x: UOp, prompt: UOp | None, assignments: UOp | None, tile_experts: UOp | None,
        factors: UOp | None, bias: UOp | None, planes: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        block = _Block(layout, tokens, rows, cols, tiles, experts, prompt, assignments, tile_experts)
        results: list[UOp] = []
        for place, row, ok, pair in block.pairs(block.sums(x, planes, gathers), bias):
            if paired:
                product = as_half(gated(pair[0], pair[1], activation))
                results.append(store(out, fragment_index(place, row // 2, rows // 2), product, ok))
                continue
            if factors is not None:
                place, pair = block.weighted(place, pair, factors, ok)
            for e, value in enumerate(pair):
                inside = ok if rows % 2 == 0 or not e else ok & (row + 1 < rows)
                if ungated:
                    index, value = fragment_index(place, row + e, rows), as_half(activated(value, ungated))
                else:
                    index = block.part * (tokens * rows) + place * rows + row + e
                results.append(store(out, index, value, inside))
        shape = f"{tiles.rows}_{tiles.cols}_{tiles.across}_{tiles.parts}_{tiles.deep}"
        shape += "_staged" * tiles.staged + "_ungated" * bool(ungated)
        full_name = f"prefill_{name}_{layout.name}_{tokens}_{rows}x{cols}_{shape}"
        n_matrices, per_token = (min(experts.n, experts.assignments), experts.used) if experts else (1, 1)
        n_bytes = layout.n_bytes(n_matrices * rows, cols)
        return finish(full_name, results, n_bytes, 2 * tokens * per_token * rows * cols)

    sorted_ = ("assignments", "tile_experts", not gathers and "factors", has_bias and "bias")
    planes = "planes", len(layout.shapes(rows, cols))
    given = sorted_ if experts else ("prompt", has_bias and "bias")
    # It waits for the kernel before at its begin: on an H200, weights loaded before that saved no time.
    return Kernel(kernel, ("out",), ("x", *given, planes), shared_hints(tiles.shared_bytes))
