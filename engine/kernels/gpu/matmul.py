"""A quantized matrix times the activations of many tokens, for prefill, on tensor cores.

The instruction mma.m16n8k16 (PTX ISA) multiplies a tile of 16 x 16 by one of 16 x 8, whose elements are spread over the
32 threads of a warp. Thread 4g + t holds four elements of rows g and g + 8 of the left tile, and four elements of
column g of the right tile. It does not matter which elements of the common dimension these are, as long as both sides
agree. Here thread t of a group of four holds a quarter of a unit, sixteen columns, in steps of four. So a thread loads
its part of the weights straight from their planes, sixteen columns of one row, and converts them to half precision in
registers. Activations are stored in the order in which threads hold them, called fragments here (`fragment_index`), so
that a thread loads 16 bytes at a time.

Each warp has a tile of the product of its own, and nothing passes through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.uops import (
    F16,
    Activation,
    finish,
    gated,
    load_index,
    load_run,
    store,
    store_run,
    zeroed_registers,
)
from engine.kernels.gpu.weight_layout import QUARTER, UNIT, WeightLayout, units_of

_MAX_HALF = 65504.0  # the largest float16


@dataclass(frozen=True)
class Tiles:
    """How a product is divided: a warp computes 16 * `rows` tokens by 8 * `cols` rows of the matrix; a block has `down`
    by `across` warps; `parts` blocks divide the common dimension, and each stores its own sum."""

    rows: int
    cols: int
    down: int
    across: int
    parts: int

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return 16 * self.rows * self.down

    @property
    def width(self) -> int:
        """Rows of the matrix of a block."""
        return 8 * self.cols * self.across


def tiles_for(tokens: int, rows: int, cols: int, multiprocessors: int, paired: bool) -> Tiles:
    """Tiles that give every multiprocessor two blocks, by dividing the common dimension if there are too few. `paired`
    products are not divided, because the activation needs the whole sums of gate and up."""
    # Tall tiles: a weight is converted to half precision once for 128 tokens.
    tiles = Tiles(min(8, tokens // 16), 4, 1, 2, 1)
    blocks = -(-tokens // tiles.tokens) * -(-rows // tiles.width)
    parts = 1
    while not paired and parts < 8 and blocks * parts < 2 * multiprocessors and units_of(cols) // parts >= 8:
        parts *= 2
    return Tiles(tiles.rows, tiles.cols, tiles.down, tiles.across, parts)


def fragment_index(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an activation in fragments, which are [16 tokens, unit, four columns of each quarter, thread,
    element]."""
    unit, quarter, quad, i = column // UNIT, column % UNIT // QUARTER, column % QUARTER // 4, column % 4
    thread = token % 8 * 4 + quarter
    element = i // 2 * 4 + token % 16 // 8 * 2 + i % 2
    return (((token // 16 * units_of(cols) + unit) * 4 + quad) * 32 + thread) * 8 + element


def fragments_size(tokens: int, cols: int) -> int:
    """Elements of the fragments of activations (tokens, cols)."""
    return tokens * units_of(cols) * UNIT


def as_half(value: UOp) -> UOp:
    """A float32 as float16, clamped to the largest one."""
    return value.maximum(-_MAX_HALF).minimum(_MAX_HALF).cast(F16)


def wmma(a: Sequence[UOp], b: Sequence[UOp], c: Sequence[UOp]) -> list[UOp]:
    """c + a @ b on tensor cores, from a thread's 8, 4 and 4 elements."""
    product = UOp.wmma(UOp.stack(*a), UOp.stack(*b), UOp.stack(*c), (8, 16, 16), "CUDA", 32)
    return [product.index(UOp.const(i)) for i in range(4)]


@functools.cache
def matmul(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: Tiles, paired: bool, name: str,
    activation: Activation = "silu",
) -> Kernel:  # fmt: skip
    """activations @ matrix.T. Buffers: the output; the activations, float16 (fragments_size(tokens, cols),); the
    prompt, int32 (2,): position and number of tokens; the matrix's planes. The output is a sum for each part, float32
    (parts, tokens, rows). If the matrix's rows are `paired`, gate and up alternating, it is activation(gate) * up
    as fragments, float16 (fragments_size(tokens, rows / 2),)."""
    units = units_of(cols)
    assert tokens % tiles.tokens == 0 and tiles.parts <= units
    steps = -(-units // tiles.parts)

    def kernel(out: UOp, x: UOp, prompt: UOp, *planes: UOp) -> UOp:
        thread, down, across = (
            UOp.special(n, f"lidx{i}") for i, n in enumerate((32, tiles.down, tiles.across))
        )
        column_block, block = (
            UOp.special(tokens // tiles.tokens, "gidx0"),
            UOp.special(-(-rows // tiles.width), "gidx1"),
        )
        part = UOp.special(tiles.parts, "gidx2") if tiles.parts > 1 else UOp.const(0)
        n = load_index(prompt, 1, tokens + 1)
        first_tile = (column_block * tiles.down + down) * tiles.rows
        first_row = (block * tiles.across + across) * (8 * tiles.cols)
        n_acc = tiles.rows * tiles.cols * 4
        acc = zeroed_registers(n_acc, 0)
        part_steps = (units - part * steps).minimum(steps) if units % tiles.parts else UOp.const(steps)
        bound = (column_block * tiles.tokens < n).where(part_steps, 0)  # blocks beyond the prompt do nothing
        step = UOp.range(bound, 0, AxisType.REDUCE) if steps > 1 else UOp.const(0)
        unit = part * steps + step
        so_far = acc.after(step) if steps > 1 else acc
        sums = [load_run(so_far, j * 4, 4) for j in range(tiles.rows * tiles.cols)]
        weights = []
        for j in range(tiles.cols):
            row = first_row + j * 8 + thread // 4
            if rows % tiles.width:
                row = row.minimum(rows - 1)
            values = layout.quarter(planes, row, units, unit, thread % 4)
            weights.append([v.cast(F16) for v in values])
        for quad in range(4):
            for i in range(tiles.rows):
                index = ((((first_tile + i) * units + unit) * 4 + quad) * 32 + thread) * 8
                left = load_run(x, index, 8)
                for j in range(tiles.cols):
                    k = i * tiles.cols + j
                    sums[k] = wmma(left, weights[j][quad * 4 : quad * 4 + 4], sums[k])
        stores = UOp.group(*store_run(acc, 0, (x for four in sums for x in four)))
        acc = acc.after(stores.end(step) if steps > 1 else stores)
        results = []
        for i in range(tiles.rows):
            for j in range(tiles.cols):
                value = load_run(acc, (i * tiles.cols + j) * 4, 4)
                for k in (0, 1):
                    token = (first_tile + i) * 16 + thread // 4 + 8 * k
                    row = first_row + j * 8 + thread % 4 * 2
                    ok = token < n if rows % tiles.width == 0 else (token < n) & (row < rows)
                    if paired:
                        index = fragment_index(token, row // 2, rows // 2)
                        product = gated(value[2 * k], value[2 * k + 1], activation)
                        results.append(store(out, index, as_half(product), ok))
                    else:
                        for e in (0, 1):
                            inside = ok if rows % 2 == 0 or not e else ok & (row + 1 < rows)
                            index = part * (tokens * rows) + token * rows + row + e
                            results.append(store(out, index, value[2 * k + e], inside))
        shape = f"{tiles.rows}_{tiles.cols}_{tiles.down}_{tiles.across}_{tiles.parts}"
        full_name = f"prefill_{name}_{layout.name}_{tokens}_{rows}x{cols}_{shape}"
        return finish(full_name, results, layout.n_bytes(rows, cols), 2 * tokens * rows * cols)

    return kernel
