"""A matrix times the activations of many tokens, for prefill, by the products of warpgroups
(`engine.fixes.warpgroup_products`).

Rows of the matrix are the left operand, in registers. As in `matmul`, a thread loads sixteen columns of a row straight
from the planes in a step, and converts them; here of two neighbouring rows. Tokens are the right operand, which a block
copies to shared memory while it computes (`StagedTiles`), and which is read there once for 64 rows. Activations lie by
eight tokens (`eights_index`), as the instruction reads them.

The products go on by themselves. Meanwhile a thread waits for those of the step before, converts the weights of the
next step where that one had its own, and loads those of a later one. The loop's body has `depth` steps, so that each
has registers of its own: if weights under way were moved from one to another, each step would wait for them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.fixes import warpgroup_products
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import shared_hints
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.half_words import word_of
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.load_ahead import LoadedAhead
from engine.targets.nvidia.kernels.products.matmul import as_half, spread
from engine.targets.nvidia.kernels.products.staged_tiles import (
    READ_LATER,
    StagedTiles,
    staged_bytes,
)
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.uops import (
    U32,
    Activation,
    at,
    finish,
    gated,
    load_run,
    store,
    zeroed_registers,
)
from engine.targets.nvidia.kernels.weights.half_pairs import quarter_pairs
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

LEAST_TOKENS = 64
"""Products are of a multiple of so many tokens."""
_PART = 8  # the fewest steps of a part
_DEEP = 2  # with so many blocks a multiprocessor at most, loads that are further ahead take less time
_STEP_US = {
    (256, 1, 2): (0.97, 0.97),
    (128, 2, 1): (0.54, 0.75),
    (128, 1, 1): (0.34, 0.65),
    (64, 1, 1): (0.34, 0.55),
}
"""By the `tokens`, `tall` and `groups` of a block: the microseconds that a step takes a multiprocessor of an H200, and
that it takes at least."""


@dataclass(frozen=True)
class WarpgroupTiles:
    """How a product is divided: a block has `tokens` tokens and `tall` times 64 rows of the matrix for each of its
    `groups` of four warps; `parts` blocks, each of which stores its own sum, share the columns. A thread has weights of
    `depth` steps under way, an even number."""

    tokens: int
    tall: int
    groups: int
    parts: int
    depth: int = 2

    @property
    def width(self) -> int:
        """Rows of the matrix of a block."""
        return warpgroup_products.ROWS * self.tall * self.groups

    def steps(self, units: int) -> int:
        """Steps of a part of a row of so many units, of which the last part may have fewer. At least two turns of the
        loop: tinygrad may put what is needed behind a loop of one turn into it."""
        return max(2, -(-units // (self.parts * self.depth))) * self.depth


def warpgroup_tiles(
    layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool
) -> WarpgroupTiles:
    """The tiles that take least time: of products, which multiprocessors have to do one after the other, and of memory
    for sums. A `paired` product's columns are not shared, because the activation needs the whole sums of gate and
    up."""
    units, rates = units_of(cols), chip.rates

    def rounds(tiles: WarpgroupTiles) -> int:
        blocks = tokens // tiles.tokens * -(-rows // tiles.width) * tiles.parts
        return math.ceil(blocks / chip.multiprocessors)

    def microseconds(tiles: WarpgroupTiles) -> float:
        of_block, at_least = _STEP_US[tiles.tokens, tiles.tall, tiles.groups]
        step = max(rounds(tiles) * of_block, at_least)
        slower = H200.tensor_tflops / rates.tensor_tflops
        sums = (tiles.parts - 1) * tokens * rows * 8
        return tiles.steps(units) * step * slower + sums / rates.copy_gbps / 1e3

    def deep(tiles: WarpgroupTiles) -> WarpgroupTiles:
        is_low = tiles.tall == tiles.groups == 1
        is_deep = is_low and (tiles.tokens == LEAST_TOKENS or rounds(tiles) <= _DEEP)
        return replace(tiles, depth=4 if is_deep else 2)

    parts = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or not (paired or units < n * _PART)]
    # Two tiles of floats would take too many registers.
    shapes = [s for s in _STEP_US if tokens % s[0] == 0 and (s[0] > LEAST_TOKENS or tokens == LEAST_TOKENS)]
    shapes = [(n, tall, g) for n, tall, g in shapes if tall == 1 or layout.bits < 16]
    tiles = [deep(WarpgroupTiles(*shape, n)) for shape in shapes for n in parts]
    return min((t for t in tiles if (t.parts - 1) * t.steps(units) < units), key=microseconds)


def eights_index(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an activation. They lie as [16 tokens, step, token, pair of columns of each quarter, quarter, one of
    the pair], the pairs of a token in the order that `warpgroup_products.added` reads."""
    step, quarter = spread(column // UNIT, column % UNIT // QUARTER, units_of(cols))
    pair, i = column % QUARTER // 8 * 4 + column % 4, column % 8 // 4
    row = (token // 16 * units_of(cols) + step) * 16 + token % 16
    return row * UNIT + (pair ^ token % 8) * 8 + quarter * 2 + i


@functools.cache
def warpgroup_matmul(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: WarpgroupTiles, paired: bool, name: str,
    activation: Activation = "silu",
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

    def kernel(out: UOp, x: UOp, prompt: UOp, planes: Sequence[UOp]) -> UOp:
        warps = warpgroup_products.WARPS * tiles.groups
        lane, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        column_block, block = UOp.special(tokens // n, "gidx0"), UOp.special(-(-rows // tiles.width), "gidx1")
        part = UOp.special(tiles.parts, "gidx2") if tiles.parts > 1 else UOp.const(0)
        first_row, first_step = (block * warps + warp) * (16 * tiles.tall), part * steps
        used = used_rows(prompt, tokens)
        own_steps = (units - first_step).minimum(steps) if tiles.parts > 1 else UOp.const(steps)
        acc = zeroed_registers(n_sums * tiles.tall, 0)
        staged = StagedTiles(
            x, units, column_block * (n // 16), n // 16, warp * 32 + lane, 32 * warps, slot=depth + 1,
            buffers=READ_LATER,
        )  # fmt: skip

        def row_of(j: int) -> UOp:
            """The first of this thread's two rows of the j-th 64."""
            return first_row + j * 16 + lane // 4 * 2

        def fetch(planes: Sequence[UOp], step: UOp) -> list[list[UOp]]:
            """This thread's weights of a step, of each row."""
            unit, quarter = spread(step.minimum(units - 1), lane % 4, units)
            places = [row_of(j) + k for j in range(tiles.tall) for k in (0, 1)]
            if rows % tiles.width:
                places = [row.minimum(rows - 1) for row in places]
            return [layout.load_quarter(planes, row, units, unit, quarter) for row in places]

        def converted(loaded: Sequence[Sequence[UOp]], step: UOp) -> list[list[UOp]]:
            """Of each row, words of pairs of weights; zeros beyond the last step."""
            _, quarter = spread(step.minimum(units - 1), lane % 4, units)
            words = [[word_of(*pair) for pair in quarter_pairs(layout, of_row, quarter)] for of_row in loaded]
            if units % depth == 0 and steps <= units:
                return words
            return [[(step < units).where(word, UOp.const(0, U32)) for word in some] for some in words]

        ahead = [LoadedAhead(fetch(planes, first_step + i), slot=i + 1) for i in range(depth)]
        effect = staged.begin_two(first_step)
        trips = (own_steps + (depth - 1)) // depth
        trip = UOp.range((column_block * n < used).where(trips, 0), 0, AxisType.REDUCE)
        following = []
        for i, weights in enumerate(ahead):
            turn = trip * depth + i
            step = first_step + turn
            # Products have taken the words of all steps but the one before.
            loaded = [[warpgroup_products.after(w, effect) for w in some] for some in weights.of(trip)]
            words = converted(loaded, step)
            array, asked, place = staged.read_later(turn, step, effect, *itertools.chain(*words))
            following.append(fetch([plane.after(asked) for plane in planes], step + depth))
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
        results = []
        for j in range(tiles.tall):
            sums, row = load_run(acc, j * n_sums, n_sums), row_of(j)
            for i in range(n_sums // 4):
                for e in (0, 1):
                    token = column_block * n + i * 8 + lane % 4 * 2 + e
                    (a, b), ok = sums[i * 4 + e :: 2][:2], token < used
                    if rows % tiles.width:
                        ok = ok & (row < rows)
                    if paired:
                        index = eights_index(token, row // 2, rows // 2)
                        results.append(store(out, index, as_half(gated(a, b, activation)), ok))
                        continue
                    place = (part * tokens + token) * rows + row
                    inside = ok if rows % 2 == 0 else ok & (row + 1 < rows)
                    results += [store(out, place, a, ok), store(out, place + 1, b, inside)]
        shape = f"{tiles.tokens}_{tiles.tall}_{tiles.groups}_{tiles.parts}_{depth}"
        full_name = f"prefill_{name}_{layout.name}_{tokens}_{rows}x{cols}_groups_{shape}"
        return finish(full_name, results, layout.n_bytes(rows, cols), 2 * tokens * rows * cols)

    planes = "planes", len(layout.shapes(rows, cols))
    # Of few tokens it loads its first weights before it waits for the kernel before, which leaves room for that.
    waits_for = ("out", "x") if n == LEAST_TOKENS else ()
    hints = shared_hints(staged_bytes(n // 16, READ_LATER), waits_for)
    return Kernel(kernel, ("out",), ("x", "prompt", planes), hints)
