"""Products of activations with packed matrices.

Activations are integers of 16 bits with a scale for each 32 (`rows.prepare`), so that a product is whole-numbered
within a group of columns: `lanes` rows side by side, two columns at a time, scaled once a group. Rounding them
costs some 1e-5 of a result. `tile` tokens share the work of taking weights apart; with a tile of 1 that work and
memory are all there is. Float matrices take float32 activations.

A kernel is for a type of matrices, not for a shape: sizes are read from a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.cpu.cores import Kernel
from engine.kernels.cpu.packing import PAIRS, UNIT, Packing, as_float
from engine.kernels.cpu.program import F32, I32, Index, Program, share

_L2_SHARE = 256 << 10  # bytes of weights that tiles of tokens take turns on, to find them in the cache
TILES = 2  # where the state says how many tiles of tokens there are


def shape_of(rows: int, cols: int, packing: Packing, added: bool, first: int = 0, out_rows: int = 0) -> list[int]:
    """What a product reads of its sizes, int32: groups of rows; blocks of a row; the row of the output that the
    first row of the matrix is; rows of the output; of what is `added` to it, or 0 where each token's is the same;
    groups that fit the share of the cache."""
    groups = packing.groups(rows)
    together = max(1, _L2_SHARE // (packing.row_words(cols) * packing.dtype.itemsize))
    out_rows = out_rows or groups * packing.lanes
    return [groups, cols // packing.block, first, out_rows, out_rows * added, together]


@dataclass(frozen=True)
class Activations:
    """What a product reads, `tile` tokens side by side. For quantized matrices: `values` int16
    (tiles, cols / 2, tile, 2) with `scales` float32 (tiles, cols / 32, tile), and of their sums `sums` int32
    (tiles, cols / 16, tile) for types with an offset, `scaled_sums` float32 (tiles, cols / 32, tile) for those
    with minima. For float matrices `floats`, float32 (tiles, cols, tile)."""

    tile: int
    cols: Index
    turn: Index
    values: UOp | None = None
    scales: UOp | None = None
    sums: UOp | None = None
    scaled_sums: UOp | None = None
    floats: UOp | None = None

    def pair(self, k: Program, n: Index, token: Index) -> UOp:
        """Columns 2n and 2n + 1 of a token, int16 (2,)."""
        assert self.values is not None
        return k.vector(self.values, (self.turn * (self.cols // 2) + n) * (2 * self.tile) + token * 2, 2)

    def scale(self, k: Program, unit: Index, token: Index) -> UOp:
        assert self.scales is not None
        return k.load(self.scales, (self.turn * (self.cols // UNIT) + unit) * self.tile + token)

    def sum(self, k: Program, run: Index, columns: int, token: Index) -> UOp:
        """The sum of 16 or 32 values, those of the n-th run of as many columns."""
        assert self.sums is not None
        n = columns // PAIRS
        at = (self.turn * (self.cols // PAIRS) + run * n) * self.tile + token
        return functools.reduce(lambda a, b: a + b, [k.load(self.sums, at + i * self.tile) for i in range(n)])

    def scaled_sum(self, k: Program, unit: Index, token: Index) -> UOp:
        """The sum of 32 values times their scale."""
        assert self.scaled_sums is not None
        return k.load(self.scaled_sums, (self.turn * (self.cols // UNIT) + unit) * self.tile + token)

    def float(self, k: Program, column: Index, token: Index) -> UOp:
        assert self.floats is not None
        return k.load(self.floats, (self.turn * self.cols + column) * self.tile + token)


def inputs_of(packings: Sequence[Packing]) -> tuple[str, ...]:
    """The names of the activations (fields of `Activations`) that products with such matrices read."""
    formats = [packing.format for packing in packings]
    needed = {
        "values": any(formats),
        "scales": any(formats),
        "sums": any(f and f.offset for f in formats),
        "scaled_sums": any(f and "m" in f.scales for f in formats),
        "floats": not all(formats),
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


@functools.cache
def product(packing: Packing, cores: int, tile: int) -> Kernel:
    """Products of activations with a matrix, plus what is added to them: a residual stream, a bias, zeros. Buffers:
    out, float32 (tokens, out_rows); the sizes (`shape_of`); with a tile of more than 1 the state (`TILES`); the
    activations that `inputs_of` names; what is added, float32 (tokens or 1, out_rows); the matrix's stream."""

    def kernel(core: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k, rest = Program(packing.lanes), list(buffers)
        groups, blocks, offset, out_rows, added_rows, together = (k.index(shape, i) for i in range(6))
        tiles: Index = k.index(rest.pop(0), TILES) if tile > 1 else 1
        inputs = {name: rest.pop(0) for name in inputs_of([packing])}
        added, stream = rest
        first, count = share(groups, cores, core)
        chunks: Index = (count + together - 1) // together if tile > 1 else 1
        with k.loop(chunks) as chunk, k.loop(tiles) as turn, k.loop(together if tile > 1 else count) as i:
            group = first + i
            if tile > 1:  # past the end of the last chunk, the last group again
                group = first + (chunk * together + i).minimum(count - 1)
            x = Activations(tile, blocks * packing.block, turn, **inputs)
            row = offset + group * packing.lanes
            for t, total in enumerate(_totals(k, packing, stream, group, blocks, x)):
                token = turn * tile + t
                k.store(out, token * out_rows + row, total + k.vector(added, token * added_rows + row))
        return k.finish(f"product_{packing.name}_{tile}")

    return kernel


def silu(k: Program, x: UOp) -> UOp:
    return x * (k.exp(x * -1.0) + 1.0).reciprocal()


def _totals(k: Program, packing: Packing, stream: UOp, group: UOp, blocks: UOp, x: Activations) -> list[UOp]:
    """The products of a group of rows with each token of the tile, float32 (lanes,)."""
    body = _quantized if packing.format else _floats
    return body(k, packing, stream, group, blocks, x)


def _floats(k: Program, packing: Packing, stream: UOp, group: UOp, cols: UOp, x: Activations) -> list[UOp]:
    lanes, tile = k.lanes, x.tile
    chains = 4 if tile == 1 else 1  # sums side by side, since each step waits for the one before
    sums = [k.registers(lanes) for _ in range(chains * tile)]
    for s in sums:
        k.fill(s, 0, UOp.const(0.0, F32))
    with k.loop(cols // chains) as step:
        for c in range(chains):
            column = step * chains + c
            weight = as_float(k.vector(stream, (group * cols + column) * lanes))
            for token in range(tile):
                s = sums[c * tile + token]
                k.store(s, 0, k.vector(s, 0) + weight * x.float(k, column, token))
    totals = [k.vector(s, 0) for s in sums]
    return totals if tile > 1 else [functools.reduce(lambda a, b: a + b, totals)]


def _quantized(k: Program, packing: Packing, stream: UOp, group: UOp, blocks: UOp, x: Activations) -> list[UOp]:
    lanes, tile, format = k.lanes, x.tile, packing.format
    assert format
    units = packing.block // UNIT
    totals = [k.registers(lanes) for _ in range(tile)]
    sums = [k.registers(2 * lanes, I32) for _ in range(max(1, tile // 2))]  # two tokens', or two halves of one's
    scales = k.registers(lanes)
    for total in totals:
        k.fill(total, 0, UOp.const(0.0, F32))
    with k.loop(blocks) as block, k.loop(units) as u:
        at = (group * blocks + block) * packing.block_words
        unit = block * units + u
        words = at + packing.head + u * packing.unit
        with k.loop(UNIT // format.group) as run:
            _dots(k, packing, stream, words, unit, run, x, sums)
            scale = packing.half(k, stream, at)
            if packing.small_scales:
                scale = scale * packing.small_scale(k, stream, words, run)
            k.store(scales, 0, scale)
            minimum = None
            if "m" in format.scales:
                minimum = packing.half(k, stream, at + lanes)
                if packing.small_scales:
                    minimum = minimum * packing.small_scale(k, stream, words, 1)
            for token, total in enumerate(totals):
                dot = k.vector(sums[token // 2], token % 2 * lanes)
                if tile == 1:
                    dot = dot + k.vector(sums[0], lanes)
                value = dot.cast(F32) * (k.vector(scales, 0) * x.scale(k, unit, token))
                if minimum is not None:
                    value = value - minimum * x.scaled_sum(k, unit, token)
                k.store(total, 0, k.vector(total, 0) + value)
    return [k.vector(total, 0) for total in totals]


def _dots(
    k: Program, packing: Packing, stream: UOp, words: UOp, unit: UOp, run: Index, x: Activations, sums: list[UOp]
) -> None:
    """Whole-numbered products of a run of columns (one group) into `sums`."""
    format, lanes, tile = packing.format, k.lanes, x.tile
    assert format
    n = format.group // 2  # pairs of the run
    together = min(n, max(4, packing.pairs_together))
    for token in range(max(2, tile)):
        start: UOp = UOp.const(0, I32)
        if format.offset and token < tile:
            start = x.sum(k, unit * (UNIT // format.group) + run, format.group, token) * -format.offset
        k.fill(sums[token // 2], token % 2 * lanes, start)
    with k.loop(n // together) as step:
        first = run * n + step * together
        pairs = packing.pairs(k, stream, words, first, together)
        column = unit * PAIRS + first

        def dot(i: int, token: int) -> UOp:
            return k.multiply_pairs(pairs[i], k.repeat_pair(x.pair(k, column + i, token)))

        for two, total in enumerate(sums):
            value = k.vector(total, 0, 2 * lanes)
            for i in range(0, together, 2 if tile == 1 else 1):
                both = (dot(i, 0), dot(i + 1, 0)) if tile == 1 else (dot(i, 2 * two), dot(i, 2 * two + 1))
                value = value + k.concat(*both)
            k.store(total, 0, value)
