"""A matrix times the activations of many tokens, for prefill, by the products of warpgroups
(`engine.fixes.warpgroup_products`).

Rows of the matrix are the left operand, in registers. As in `matmul`, a thread loads sixteen columns of a row straight
from the planes in a step, and converts them; here of two neighbouring rows. Tokens are the right operand, which a block
copies to shared memory while it computes (`StagedTiles`), and which is read there once for 64 rows. Activations lie by
eight tokens (`eights_index`), as the instruction reads them.

The products go on by themselves. Meanwhile a thread loads the weights of the step after the next one, and converts
those of the next one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.fixes import warpgroup_products
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import shared_hints
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.half_words import word_of
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.load_ahead import LoadedAhead
from engine.targets.nvidia.kernels.products.matmul import as_half, spread
from engine.targets.nvidia.kernels.products.staged_tiles import StagedTiles, staged_bytes
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.uops import (
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

LEAST_TOKENS = 128
"""Products are of a multiple of so many tokens."""
_PART = 8  # the fewest steps of a part
_STEP_US = {(256, 1, 2): (0.97, 0.97), (128, 2, 1): (0.54, 0.75), (128, 1, 1): (0.31, 0.65)}
"""By the `tokens`, `tall` and `groups` of a block: the microseconds that a step takes a multiprocessor of an H200, and
that it takes at least."""


@dataclass(frozen=True)
class WarpgroupTiles:
    """How a product is divided: a block has `tokens` tokens and `tall` times 64 rows of the matrix for each of its
    `groups` of four warps; `parts` blocks, each of which stores its own sum, share the columns."""

    tokens: int
    tall: int
    groups: int
    parts: int

    @property
    def width(self) -> int:
        """Rows of the matrix of a block."""
        return warpgroup_products.ROWS * self.tall * self.groups


def warpgroup_tiles(
    layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool
) -> WarpgroupTiles:
    """The tiles that take least time: of products, which multiprocessors have to do one after the other, and of memory
    for sums. A `paired` product's columns are not shared, because the activation needs the whole sums of gate and
    up."""
    units, rates = units_of(cols), chip.rates

    def microseconds(tiles: WarpgroupTiles) -> float:
        blocks = tokens // tiles.tokens * -(-rows // tiles.width) * tiles.parts
        of_block, at_least = _STEP_US[tiles.tokens, tiles.tall, tiles.groups]
        step = max(math.ceil(blocks / chip.multiprocessors) * of_block, at_least)
        slower = H200.tensor_tflops / rates.tensor_tflops
        sums = (tiles.parts - 1) * tokens * rows * 8
        return -(-units // tiles.parts) * step * slower + sums / rates.copy_gbps / 1e3

    parts = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or not (paired or units < n * _PART)]
    # Two tiles of floats of 32 bits would take too many registers.
    shapes = [(n, tall, g) for n, tall, g in _STEP_US if tokens % n == 0 and (tall == 1 or layout.bits <= 16)]
    return min((WarpgroupTiles(*shape, n) for shape in shapes for n in parts), key=microseconds)


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
    units, n = units_of(cols), tiles.tokens
    steps = -(-units // tiles.parts)
    assert tokens % n == 0 and tiles.parts <= units and not (paired and (rows % 2 or tiles.parts > 1))
    n_sums = n // 2  # of a thread and 64 rows

    def kernel(out: UOp, x: UOp, prompt: UOp, planes: Sequence[UOp]) -> UOp:
        warps = warpgroup_products.WARPS * tiles.groups
        lane, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        column_block, block = UOp.special(tokens // n, "gidx0"), UOp.special(-(-rows // tiles.width), "gidx1")
        part = UOp.special(tiles.parts, "gidx2") if tiles.parts > 1 else UOp.const(0)
        first_row, first_step = (block * warps + warp) * (16 * tiles.tall), part * steps
        used = used_rows(prompt, tokens)
        own_steps = (units - first_step).minimum(steps) if units % tiles.parts else UOp.const(steps)
        acc = zeroed_registers(n_sums * tiles.tall, 0)
        staged = StagedTiles(
            x, units, column_block * (n // 16), n // 16, warp * 32 + lane, 32 * warps, slot=3
        )
        begun = staged.begin_two(first_step)
        step = UOp.range((column_block * n < used).where(own_steps, 0), 0, AxisType.REDUCE)
        row_step = first_step + step

        def row_of(j: int) -> UOp:
            """The first of this thread's two rows of the j-th 64."""
            return first_row + j * 16 + lane // 4 * 2

        def fetch(step: UOp) -> list[list[UOp]]:
            """This thread's weights of a step, of each row."""
            unit, quarter = spread(step.minimum(units - 1), lane % 4, units)
            places = [row_of(j) + k for j in range(tiles.tall) for k in (0, 1)]
            if rows % tiles.width:
                places = [row.minimum(rows - 1) for row in places]
            return [layout.load_quarter(planes, row, units, unit, quarter) for row in places]

        def converted(loaded: Sequence[Sequence[UOp]], step: UOp) -> list[list[UOp]]:
            """Of each row, words of pairs of weights."""
            _, quarter = spread(step.minimum(units - 1), lane % 4, units)
            return [[word_of(*pair) for pair in quarter_pairs(layout, words, quarter)] for words in loaded]

        weights = LoadedAhead(converted(fetch(first_step), first_step), slot=1)
        ahead = LoadedAhead(fetch(first_step + 1), slot=2)
        words, loaded, following = weights.of(step), ahead.of(step), fetch(row_step + 2)
        array, asked, first = staged.when_read(step, row_step, begun)
        latest = warpgroup_products.begun(asked, *(word for some in words for word in some))
        for quad in range(4):
            for j in range(tiles.tall):
                sums = [at(acc.after(step), j * n_sums + i) for i in range(n_sums)]
                left = [words[2 * j + k][quad * 2 + p] for p in (0, 1) for k in (0, 1)]
                right = at(array, first + quad * warpgroup_products.DEPTH)
                latest = warpgroup_products.added(sums, left, right, latest)
        closed = warpgroup_products.closed(latest)
        next_words = converted(
            [[warpgroup_products.after(word, closed) for word in some] for some in loaded], row_step + 1
        )
        done = warpgroup_products.done(closed, *(word for some in next_words for word in some))
        kept = weights.keep_after(next_words, done, moved=True), ahead.keep_after(following, done)
        acc = acc.after(UOp.group(*kept).end(step))
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
        shape = f"{tiles.tokens}_{tiles.tall}_{tiles.groups}_{tiles.parts}"
        full_name = f"prefill_{name}_{layout.name}_{tokens}_{rows}x{cols}_groups_{shape}"
        return finish(full_name, results, layout.n_bytes(rows, cols), 2 * tokens * rows * cols)

    planes = "planes", len(layout.shapes(rows, cols))
    return Kernel(kernel, ("out",), ("x", "prompt", planes), shared_hints(staged_bytes(n // 16)))
