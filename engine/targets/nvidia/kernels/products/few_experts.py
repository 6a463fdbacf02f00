"""Products of experts with few tokens each, on tensor cores: for conversations that decode together, and for short
prompts.

Nearly all experts have some tokens then, so their weights are read, and these bytes are what the time goes to. As in
`small_batch`, a tile of an expert's matrix is the left operand, and the columns of the right one are tokens: eight of
one expert (`ExpertTiles`), where `matmul` would multiply sixteen, most of them of nobody, and convert each weight for
them. A block has some rows of an expert, and a tile of its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.products.matmul import ExpertTiles, as_half
from engine.targets.nvidia.kernels.products.small_batch import (
    BlockSums,
    SmallBatchTiles,
    column_index,
    multiply,
    n_blocks,
    steps_of,
    sums_of_parts,
)
from engine.targets.nvidia.kernels.uops import (
    Activation,
    f32,
    finish,
    gated,
    load,
    load_index,
    load_run,
    store,
    store_run,
    zeroed_registers,
)
from engine.targets.nvidia.kernels.weights.half_pairs import unit_pairs
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

_TILE, _ROWS, _ABREAST, _RUN = 8, 16, 4, 8  # as in `small_batch`
_FEW = 4  # experts with so many tokens on average have few enough for a tile, nearly always
_WARPS = 4  # of a block


def few_tiles(tokens: int, used: int, n: int) -> ExpertTiles | None:
    """The tiles of a step of so many tokens, if experts have few of them."""
    return ExpertTiles(tokens, used, n, _TILE) if tokens * used <= _FEW * n else None


def block_tiles(cols: int) -> SmallBatchTiles:
    """How the warps of a block divide a product: as many share the columns of 16 rows as have two steps each."""
    parts = next(n for n in (_WARPS, 2, 1) if steps_of(cols) % (2 * n) == 0 or n == 1)
    return SmallBatchTiles(1, _WARPS // parts, parts)


@functools.cache
def few_experts(
    layout: WeightLayout, rows: int, cols: int, tiles: SmallBatchTiles, pair: int, name: str,
    experts: ExpertTiles, activation: Activation = "silu", has_bias: bool = False,
) -> Kernel:  # fmt: skip
    """activations @ matrix.T of each expert's tokens. Buffers: as those of `matmul` with experts. A product of gate and
    up, whose rows alternate (`pair` is 2), or of up alone (1) is of the tokens' activations, float16
    (columns_size(tokens, cols),), and makes those of assignments, float16 (columns_size(experts.size, rows / pair),),
    which the other one takes (`pair` is 0)."""
    assert experts.tile % _TILE == 0 and rows % 2 == 0 and tiles.splits == 1 and tiles.parts <= steps_of(cols)
    units, steps, columns, used = units_of(cols), steps_of(cols), experts.tile // _TILE, experts.used
    n_acc, parts = tiles.rows * columns * 4, tiles.parts

    def kernel(
        out: UOp, x: UOp, assignments: UOp, tile_experts: UOp, factors: UOp | None, bias: UOp | None,
        planes: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        lane, across = UOp.special(32, "lidx0"), UOp.special(tiles.across, "lidx1")
        part, block = UOp.special(parts, "lidx2"), UOp.special(n_blocks(rows, tiles), "gidx0")
        tile = UOp.special(experts.count, "gidx1")
        live = load(tile_experts, tile) >= 0
        expert_row = load_index(tile_experts, tile, experts.n) * rows
        g, t, first = lane // _ABREAST, lane % _ABREAST, block * tiles.width
        acc = zeroed_registers(n_acc, 0)
        trips = (steps - part + (parts - 1)) // parts if steps % parts else UOp.const(steps // parts)
        loops = steps > parts  # tinygrad moves code that precedes a loop of one step at most into the loop
        loop = UOp.range(live.where(trips, UOp.const(0)), 0, AxisType.REDUCE) if loops else UOp.const(0)
        step = loop * parts + part
        unit = step * _ABREAST + t
        if units % _ABREAST:  # a thread beyond the row multiplies some weights by zeros
            unit = unit.minimum(units - 1)

        def assigned(column: UOp) -> UOp:
            """The token of a column of the tile; some other one where there is none."""
            return load_index(assignments, tile * experts.tile + column, experts.assignments) // used

        rights = []
        for c in range(columns):
            column = assigned(c * _TILE + g) if pair else tile * experts.tile + c * _TILE + g
            group, thread = column // _TILE, column % _TILE * _ABREAST + t
            runs = ((group * steps + step) * (UNIT // _RUN) + i for i in range(UNIT // _RUN))
            rights.append([v for run in runs for v in load_run(x, (run * 32 + thread) * _RUN, _RUN)])
        sums = load_run(acc.after(loop) if loops else acc, 0, n_acc)
        for r in range(tiles.rows):
            sides = []
            for side in (0, 1):
                row = first + (across * tiles.rows + r) * _ROWS + side * 8 + g
                if rows % tiles.width:
                    row = row.minimum(rows - 1)
                words = layout.load_words(planes, row + expert_row, units, unit)
                sides.append(unit_pairs(layout.unit_of(words)))
            multiply(sums, r, sides, rights)
        so_far = UOp.group(*store_run(acc, 0, sums))
        acc = acc.after(so_far.end(loop) if loops else so_far)
        total = sums_of_parts(acc, tiles, columns, part, across, lane)
        own = (part * tiles.across + across) * 32 + lane
        block_sums = BlockSums(
            tiles.width, experts.tile, rows, tiles.threads, first, block, UOp.const(0), own, total
        )
        stores = []
        for i, column, inside in block_sums.shares(pair or 1):
            place, row, ok = tile * experts.tile + column, first + i, inside & live
            values = [total(i + e, column) for e in range(pair or 1)]
            if bias is not None:
                values = [v + load(bias, expert_row + row + e, ok) for e, v in enumerate(values)]
            if pair:
                half = as_half(gated(values[0], values[1] if pair == 2 else f32(1), activation))
                stores.append(store(out, column_index(place, row // pair, rows // pair), half, ok))
            else:
                assert factors is not None
                ok = ok & (load(assignments, place) >= 0)
                assignment = load_index(assignments, place, experts.assignments)
                index = (assignment % used * experts.tokens + assignment // used) * rows + row
                stores.append(store(out, index, values[0] * load(factors, assignment, ok), ok))
        shape = f"{tiles.rows}_{tiles.across}_{parts}_{experts.tile}"
        full_name = f"few_{name}_{layout.name}_{experts.tokens}_{rows}x{cols}_{shape}"
        n_bytes = layout.n_bytes(min(experts.n, experts.assignments) * rows, cols)
        return finish(full_name, stores, n_bytes, 2 * experts.assignments * rows * cols)

    lists = "assignments", "tile_experts", not pair and "factors", has_bias and "bias"
    return Kernel(kernel, ("out",), ("x", *lists, ("planes", len(layout.shapes(rows, cols)))))
