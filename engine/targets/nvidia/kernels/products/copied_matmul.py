"""A matrix of float16 times the activations of many tokens, for prefill, by products of warpgroups that take both
operands from shared memory.

It does what `warpgroup_matmul` does for all other types, whose weights are converted in registers. Those of float16 are
what the instruction multiplies. So the first thread asks for a tile of them and one of activations at a time, some
steps ahead, each by one instruction (`engine.fixes.tensor_copies`). No thread has addresses to compute, and weights on
their way take no registers. Rows of activations lie as those of the matrix (`halves_index`).

In each step all threads wait for its tiles and for each other. Then nobody reads the tiles of the step before the last
one any more, and others may take their place. What is asked for before the kernel before has ended are weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import AxisType, Ops

from engine.fixes import tensor_copies, warpgroup_products
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import shared_hints
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.tensor_maps import MAP_WORDS
from engine.targets.nvidia.kernels.products.warpgroup_matmul import (
    LEAST_TOKENS,
    Block,
    Span,
    WarpgroupTiles,
    stored,
)
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.uops import F16, Activation, at, finish, shared, zeroed_registers
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

ROWS = 16
"""A matrix has a multiple of so many rows."""
_BARRIER_BYTES = 16  # of a buffer, with what aligns the last one
_SHARED_BYTES = 208 << 10  # of a block's tiles
_FEW_AHEAD = 2  # steps, so that two blocks of few tokens fit on a multiprocessor
_PART = 8  # the fewest steps of a part
_STEP_US = {(256, 2): 0.70, (128, 3): 0.57, (128, 2): 0.39, (64, 2): 0.25}
"""By the `tokens` and `groups` of a block: the microseconds that a step takes a multiprocessor of an H200."""
_ROUND_US = 4.0  # what a round of blocks takes beside its steps


@dataclass(frozen=True)
class CopiedTiles(WarpgroupTiles):
    """How a product is divided, as `WarpgroupTiles`, in one tile of 64 rows for each group. Tiles of `depth` steps are
    asked for ahead."""

    @property
    def buffers(self) -> int:
        """How many buffers there are: those of steps ahead, and of two that products may still read."""
        return self.depth + 2

    @property
    def step_halves(self) -> int:
        """Elements of a step's tiles."""
        return (self.width + self.tokens) * UNIT


def halves_index(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an activation in rows whose columns lie as those of a float16 matrix (`WeightLayout.word_index`)."""
    units = units_of(cols)
    unit, quarter = column // UNIT, column % UNIT // QUARTER
    return ((token * (UNIT // QUARTER) + quarter) * units + unit) * QUARTER + column % QUARTER


@dataclass(frozen=True)
class _Tiles:
    """The tiles of a block in shared memory: `steps` steps of the columns from the `first` on; `row`, the first of 16,
    and `token` say where they begin. `asks`: whether a thread is the one that asks."""

    tiles: CopiedTiles
    maps: UOp
    weights: UOp
    x: UOp
    first: UOp
    steps: UOp
    row: UOp
    token: UOp
    asks: UOp

    @property
    def array(self) -> UOp:
        return shared(self.tiles.buffers * self.tiles.step_halves, 1, F16)

    def barrier(self, turn: UOp | int) -> UOp:
        return at(shared(self.tiles.buffers, 2, dtypes.uint64), turn % self.tiles.buffers)

    def begun(self) -> UOp:
        """Asks for the first tiles, the weights first."""
        begun = [tensor_copies.begun(self.barrier(i), self.asks) for i in range(self.tiles.buffers)]
        known = [tensor_copies.known(at(self.maps, i * MAP_WORDS), self.asks, *begun) for i in (0, 1)]
        effect = UOp(Ops.BARRIER, src=(tensor_copies.shown(*known),))
        for ask in (self._left, self._right):
            for i in range(self.tiles.depth):
                effect = ask(UOp.const(i), effect)
        return effect

    def read(self, turn: UOp, begun: UOp) -> tuple[UOp, UOp, UOp]:
        """The array once it has the tiles of a step, the loop's `turn`-th, and those of a later one are asked for; what
        to wait for in order to have asked; the index of the step's first element."""
        phase = turn // self.tiles.buffers % 2
        arrived = tensor_copies.arrived(self.barrier(turn), phase, begun, turn)
        met = UOp(Ops.BARRIER, src=(arrived,))
        ahead = turn + self.tiles.depth
        return self.array.after(met), self._right(ahead, self._left(ahead, met)), self._place(turn)

    def _place(self, turn: UOp) -> UOp:
        return turn % self.tiles.buffers * self.tiles.step_halves

    def _left(self, turn: UOp, after: UOp) -> UOp:
        target, source = at(self.array, self._place(turn)), at(self.weights, 0)
        barrier, ok = self.barrier(turn), self.asks & (turn < self.steps)
        expected = tensor_copies.expected(barrier, self.tiles.step_halves * 2, ok, after)
        operands = target, at(self.maps, 0), source, (self._column(turn), self.row), barrier, ok
        return tensor_copies.asked(*operands, expected, in_pairs=True)

    def _right(self, turn: UOp, after: UOp) -> UOp:
        target, source = at(self.array, self._place(turn) + self.tiles.width * UNIT), at(self.x, 0)
        barrier, ok = self.barrier(turn), self.asks & (turn < self.steps)
        operands = target, at(self.maps, MAP_WORDS), source, (self._column(turn), self.token), barrier, ok
        return tensor_copies.asked(*operands, after)

    def _column(self, turn: UOp) -> UOp:
        return (self.first + turn) * UNIT


@functools.cache
def copied_matmul(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: CopiedTiles, paired: bool, name: str,
    activation: Activation = "silu", span: Span | None = None,
) -> Kernel:  # fmt: skip
    """As `warpgroup_matmul`, with one buffer more: maps, the descriptors of the matrix and of x, uint32
    (`tensor_maps.operand_maps`), whose tiles are the kernel's. Activations are by `halves_index`, also of the
    output."""
    units, n, sums = units_of(cols), tiles.tokens, tiles.tokens // 2
    steps = -(-units // tiles.parts)
    first, end = span or (0, rows)
    warps = warpgroup_products.WARPS * tiles.groups
    assert rows % ROWS == first % ROWS == tokens % n == 0 and tiles.tall == 1
    assert (tiles.parts - 1) * steps < units and not (paired and tiles.parts > 1)

    def kernel(out: UOp, x: UOp, prompt: UOp, maps: UOp, planes: Sequence[UOp]) -> UOp:
        lane, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        column_block = UOp.special(tokens // n, "gidx0")
        block = UOp.special(-(-(end - first) // tiles.width), "gidx1")
        part = UOp.special(tiles.parts, "gidx2") if tiles.parts > 1 else UOp.const(0)
        token, first_row = column_block * n, block * tiles.width + first
        own_steps = (units - part * steps).minimum(steps) if tiles.parts > 1 else UOp.const(units)
        own_steps = (token < used_rows(prompt, tokens)).where(own_steps, 0)
        acc = zeroed_registers(sums, 0)
        read = _Tiles(
            tiles, maps, planes[0], x, part * steps, own_steps, first_row // ROWS, token, (lane + warp).eq(0)
        )
        begun = read.begun()
        trip = UOp.range(own_steps, 0, AxisType.REDUCE)
        array, asked, place = read.read(trip, begun)
        left = place + warp // warpgroup_products.WARPS * (warpgroup_products.ROWS * UNIT)
        right, latest = place + tiles.width * UNIT, warpgroup_products.begun(asked)
        for quad in range(UNIT // warpgroup_products.DEPTH):
            operands = (at(array, side + quad * warpgroup_products.DEPTH) for side in (left, right))
            own = [at(acc.after(trip), e) for e in range(sums)]
            latest = warpgroup_products.added_shared(own, *operands, latest)
        closed = warpgroup_products.all_but(1, warpgroup_products.closed(latest))
        ended = warpgroup_products.all_but(0, closed.end(trip))
        # tinygrad drops what is neither a barrier nor a store.
        acc = acc.after(UOp(Ops.BARRIER, src=(ended,)))
        of_block = Block(tokens, rows, end, (end - first) % tiles.width == 0, token, part, lane)
        row = first_row + warp * 16 + lane // 4 * 2
        results = stored(out, acc, 0, sums, row, of_block, activation if paired else None, halves_index)
        shape = f"{n}_{tiles.groups}_{tiles.parts}_{tiles.depth}"
        full_name = f"prefill_{name}_{layout.name}_{tokens}_{rows}x{cols}_copied_{shape}"
        full_name += f"_{first}_{end}" * (end - first < rows)
        return finish(full_name, results, layout.n_bytes(rows, cols), 2 * tokens * rows * cols)

    planes = "planes", len(layout.shapes(rows, cols))
    n_bytes = tiles.buffers * (tiles.step_halves * 2 + _BARRIER_BYTES)
    return Kernel(kernel, ("out",), ("x", "prompt", "maps", planes), shared_hints(n_bytes, ("out", "x")))


def copied_tiles(tokens: int, rows: int, cols: int, chip: Chip, paired: bool) -> CopiedTiles:
    """The tiles that take least time: of products, which multiprocessors have to do one round of blocks after the
    other, of memory for weights and for sums, and of launches. Where the last round of large blocks has few of them,
    its rows may have a launch of smaller ones."""
    units, rates = units_of(cols), chip.rates
    slower = H200.tensor_tflops / rates.tensor_tflops

    def blocks(tiles: CopiedTiles, rows: int) -> int:
        return tokens // tiles.tokens * -(-rows // tiles.width) * tiles.parts

    def microseconds(tiles: CopiedTiles, rows: int) -> float:
        of_round = -(-units // tiles.parts) * _STEP_US[tiles.tokens, tiles.groups] + _ROUND_US
        products = math.ceil(blocks(tiles, rows) / chip.multiprocessors) * of_round * slower
        weights, sums = rows * units * UNIT * 2, (tiles.parts - 1) * tokens * rows * 8
        return math.hypot(products, weights / rates.copy_gbps / 1e3) + sums / rates.copy_gbps / 1e3

    def found(parts: Sequence[int]) -> list[CopiedTiles]:
        shapes = [shape for shape in _STEP_US if tokens % shape[0] == 0]
        return [CopiedTiles(n, 1, groups, part, _depth(n, groups)) for n, groups in shapes for part in parts]

    parts = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or not (paired or units < n * _PART)]
    choices = [(microseconds(tiles, rows), tiles) for tiles in found(parts)]
    for tiles in found([1]):
        rounds = blocks(tiles, rows) // chip.multiprocessors
        first = rounds * chip.multiprocessors * tiles.tokens // tokens * tiles.width
        if 0 < first < rows:
            rest = min(found([1]), key=lambda rest: microseconds(rest, rows - first))
            of_two = microseconds(tiles, first) + microseconds(rest, rows - first)
            choices.append((of_two, replace(tiles, rest=(first, rest))))
    best = min(choices, key=lambda choice: choice[0])[1]
    is_few = best.tokens == LEAST_TOKENS and blocks(best, rows) > chip.multiprocessors
    return replace(best, depth=_FEW_AHEAD) if is_few else best


def _depth(tokens: int, groups: int) -> int:
    """As many steps ahead as shared memory has room for."""
    return _SHARED_BYTES // (CopiedTiles(tokens, 1, groups, 1).step_halves * 2) - 2
