"""Products of activations with packed matrices.

Activations are integers of 16 bits with a scale for each 32 (`rows.prepare`), so that a product is
whole-numbered within a group of columns: `lanes` rows side by side, two columns at a time, scaled once a
group. Rounding them costs some 1e-5 of a result. Float matrices take float32 activations.

With one token, taking weights apart and memory are all there is: integers are multiplied as they are stored,
and offsets are applied to sums of activations. With tiles of tokens, weights are taken apart once for all
tokens, a span of columns at a time that stays in the first cache.

A kernel is for a type of matrices, not for a shape: sizes are read from a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.cpu.packing import PAIRS, UNIT, Packing, as_float
from engine.kernels.cpu.program import F32, I16, I32, Index, Program, share
from engine.kernels.cpu.thread_pool import Kernel

MAX_TILES = 8
TILES = 2  # where the state says how many tiles of tokens there are
_TOGETHER = 2  # pairs of columns that a step with tiles takes


def shape_of(
    rows: int, cols: int, packing: Packing, added: bool, first: int = 0, out_rows: int = 0
) -> list[int]:
    """What a product reads of its sizes, int32: groups of rows; blocks of a row; the row of the output that
    the first row of the matrix is; rows of the output; of what is `added` to it, or 0 where each token's is
    the same."""
    groups = packing.groups(rows)
    out_rows = out_rows or groups * packing.lanes
    return [groups, cols // packing.block, first, out_rows, out_rows * added]


def span_of(cols: int) -> int:
    """Units of columns that are taken apart at a time."""
    return next(n for n in (8, 4, 2, 1) if cols // UNIT % n == 0)


@dataclass(frozen=True)
class Activations:
    """What a product reads, `tile` tokens side by side. For quantized matrices: `values` int16
    (tiles, cols / 2, tile, 2) with `scales` float32 (tiles, cols / 32, tile), and of their sums, with one
    token, `sums` int32 (cols / 16,) for types with an offset, `scaled_sums` float32 (tiles, cols / 32, tile)
    for those with minima. For float matrices `floats`, float32 (tiles, cols, tile)."""

    tile: int
    cols: Index
    values: UOp | None = None
    scales: UOp | None = None
    sums: UOp | None = None
    scaled_sums: UOp | None = None
    floats: UOp | None = None

    def pair(self, k: Program, turn: Index, n: Index, token: Index) -> UOp:
        """Columns 2n and 2n + 1 of a token of a tile, int16 (2,)."""
        assert self.values is not None
        return k.vector(self.values, (turn * (self.cols // 2) + n) * (2 * self.tile) + token * 2, 2)

    def scale(self, k: Program, turn: Index, unit: Index, token: Index) -> UOp:
        assert self.scales is not None
        return k.load(self.scales, (turn * (self.cols // UNIT) + unit) * self.tile + token)

    def sum(self, k: Program, run: Index, columns: int) -> UOp:
        """The sum of 16 or 32 values of the one token, those of the n-th run of as many columns."""
        assert self.sums is not None
        n = columns // PAIRS
        return functools.reduce(lambda a, b: a + b, [k.load(self.sums, run * n + i) for i in range(n)])

    def scaled_sum(self, k: Program, turn: Index, unit: Index, token: Index) -> UOp:
        """The sum of 32 values times their scale."""
        assert self.scaled_sums is not None
        return k.load(self.scaled_sums, (turn * (self.cols // UNIT) + unit) * self.tile + token)

    def float(self, k: Program, turn: Index, column: Index, token: Index) -> UOp:
        assert self.floats is not None
        return k.load(self.floats, (turn * self.cols + column) * self.tile + token)


def inputs_of(packings: Sequence[Packing], tile: int) -> tuple[str, ...]:
    """The names of the activations (fields of `Activations`) that products with such matrices read."""
    formats = [packing.format for packing in packings]
    needed = {
        "values": any(formats),
        "scales": any(formats),
        "sums": tile == 1 and any(f and f.offset for f in formats),
        "scaled_sums": any(f and "m" in f.scales for f in formats),
        "floats": not all(formats),
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


@functools.cache
def product(packing: Packing, tile: int, span: int = 1) -> Kernel:
    """Products of activations with a matrix, plus what is added to them: a residual stream, a bias, zeros.
    Buffers: out, float32 (tokens, out_rows); the sizes (`shape_of`); with a tile of more than 1 the state
    (`TILES`); the activations that `inputs_of` names; what is added, float32 (tokens or 1, out_rows); the
    matrix's stream. `span`: see `span_of`; with a tile of 1 it does not matter."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k, rest = Program(packing.lanes), list(buffers)
        groups, blocks, offset, out_rows, added_rows = (k.index(shape, i) for i in range(5))
        tiles: Index = k.index(rest.pop(0), TILES) if tile > 1 else 1
        inputs = {name: rest.pop(0) for name in inputs_of([packing], tile)}
        x = Activations(tile, blocks * packing.block, **inputs)
        added, stream = rest
        first, count = share(groups, part, parts)
        with k.loop(count) as i:
            group = first + i
            row = offset + group * packing.lanes

            def finish(token: Index, total: UOp) -> None:
                k.store(out, token * out_rows + row, total + k.vector(added, token * added_rows + row))

            if packing.format is None:
                with k.loop(tiles) as turn:
                    for t, total in enumerate(_floats(k, stream, group, x, turn)):
                        finish(turn * tile + t, total)
            elif tile == 1:
                finish(0, _one_token(k, packing, stream, group, blocks, x))
            else:
                totals = _tiles(k, packing, stream, group, blocks, x, tiles, span)
                with k.loop(tiles) as turn, k.loop(tile) as t:
                    token = turn * tile + t
                    finish(token, k.vector(totals, token * packing.lanes))
        return k.finish(f"product_{packing.name}_{tile}")

    return kernel


def silu(k: Program, x: UOp) -> UOp:
    return x * (k.exp(x * -1.0) + 1.0).reciprocal()


def _floats(k: Program, stream: UOp, group: UOp, x: Activations, turn: Index) -> list[UOp]:
    """The products of a group of rows with each token of a tile, float32 (lanes,)."""
    lanes, tile = k.lanes, x.tile
    chains = 4 if tile == 1 else 1  # sums side by side, since each step waits for the one before
    sums = [k.registers(lanes) for _ in range(chains * tile)]
    for s in sums:
        k.fill(s, 0, UOp.const(0.0, F32))
    with k.loop(x.cols // chains) as step:
        for c in range(chains):
            column = step * chains + c
            weight = as_float(k.vector(stream, (group * x.cols + column) * lanes))
            for token in range(tile):
                s = sums[c * tile + token]
                k.store(s, 0, k.vector(s, 0) + weight * x.float(k, turn, column, token))
    totals = [k.vector(s, 0) for s in sums]
    return totals if tile > 1 else [functools.reduce(lambda a, b: a + b, totals)]


def _one_token(k: Program, packing: Packing, stream: UOp, group: UOp, blocks: UOp, x: Activations) -> UOp:
    """The products of a group of rows with the token, float32 (lanes,)."""
    lanes, format = k.lanes, packing.format
    assert format
    units = packing.block // UNIT
    n = format.group // 2  # pairs of columns in a group
    together = min(n, max(4, packing.pairs_together))
    total = k.registers(lanes)
    sums = k.registers(2 * lanes, I32)  # of every other pair each
    k.fill(total, 0, UOp.const(0.0, F32))
    with k.loop(blocks) as block, k.loop(units) as u, k.loop(UNIT // format.group) as run:
        at = (group * blocks + block) * packing.block_words
        unit = block * units + u
        words = at + packing.head + u * packing.unit
        start: UOp = UOp.const(0, I32)
        if format.offset:
            start = x.sum(k, unit * (UNIT // format.group) + run, format.group) * -format.offset
        k.fill(sums, 0, start)
        k.fill(sums, lanes, UOp.const(0, I32))
        with k.loop(n // together) as step:
            first = run * n + step * together
            pairs = packing.pairs(k, stream, words, first, together)
            dots = [
                k.multiply_pairs(w, k.repeat_pair(x.pair(k, 0, unit * PAIRS + first + i, 0)))
                for i, w in enumerate(pairs)
            ]
            value = k.vector(sums, 0, 2 * lanes)
            for a, b in zip(dots[::2], dots[1::2], strict=True):
                value = value + k.concat(a, b)
            k.store(sums, 0, value)
        scale, minimum = packing.scales(k, stream, at, words, run)
        dot = k.vector(sums, 0) + k.vector(sums, lanes)
        result = dot.cast(F32) * (scale * x.scale(k, 0, unit, 0))
        if minimum is not None:
            result = result - minimum * x.scaled_sum(k, 0, unit, 0)
        k.store(total, 0, k.vector(total, 0) + result)
    return k.vector(total, 0)


def _tiles(
    k: Program,
    packing: Packing,
    stream: UOp,
    group: UOp,
    blocks: UOp,
    x: Activations,
    tiles: Index,
    span: int,
) -> UOp:
    """The products of a group of rows with each token, in memory: float32 (tokens, lanes)."""
    lanes, tile, format = k.lanes, x.tile, packing.format
    assert format
    units = packing.block // UNIT
    totals = k.registers(MAX_TILES * tile * lanes)
    weights = k.registers(span * UNIT * lanes, I16)
    scales = k.registers(span * lanes)
    minima = k.registers(span * lanes) if "m" in format.scales else None
    with k.loop(tiles) as turn, k.loop(tile) as t:
        k.fill(totals, (turn * tile + t) * lanes, UOp.const(0.0, F32))
    with k.loop(blocks * units // span) as s:
        with k.loop(span) as i:
            unit = s * span + i
            at = (group * blocks + unit // units) * packing.block_words
            words = at + packing.head + unit % units * packing.unit
            _take_apart(k, packing, stream, words, weights, i * (UNIT * lanes))
            scale, minimum = packing.scales(k, stream, at, words, None if _scaled(packing) else 0)
            k.store(scales, i * lanes, scale)
            if minima is not None and minimum is not None:
                k.store(minima, i * lanes, minimum)
        with k.loop(tiles) as turn, k.loop(span) as i:
            unit = s * span + i
            sums = [k.registers(2 * lanes, I32) for _ in range(tile // 2)]  # of two tokens side by side
            for both in sums:
                k.fill(both, 0, UOp.const(0, I32), 2 * lanes)
            with k.loop(PAIRS // _TOGETHER) as step:
                values = [k.vector(both, 0, 2 * lanes) for both in sums]
                for p in range(_TOGETHER):
                    pair = step * _TOGETHER + p
                    w = k.vector(weights, (i * PAIRS + pair) * (2 * lanes), 2 * lanes)
                    for two in range(tile // 2):
                        tokens = (
                            k.repeat_pair(x.pair(k, turn, unit * PAIRS + pair, 2 * two + t)) for t in range(2)
                        )
                        dots = (k.multiply_pairs(w, token) for token in tokens)
                        values[two] = values[two] + k.concat(*dots)
                for both, value in zip(sums, values, strict=True):
                    k.store(both, 0, value)
            for t in range(tile):
                dot = k.vector(sums[t // 2], t % 2 * lanes)
                result = dot.cast(F32) * (k.vector(scales, i * lanes) * x.scale(k, turn, unit, t))
                if minima is not None:
                    result = result - k.vector(minima, i * lanes) * x.scaled_sum(k, turn, unit, t)
                place = (turn * tile + t) * lanes
                k.store(totals, place, k.vector(totals, place) + result)
    return totals


def _scaled(packing: Packing) -> bool:
    """Whether small scales go into the weights when they are taken apart: where a unit has several."""
    return packing.format is not None and packing.format.group < UNIT


def _take_apart(k: Program, packing: Packing, stream: UOp, words: UOp, out: UOp, at: Index) -> None:
    """Stores a unit's weights as pairs, int16 (16, 2 * lanes), offsets applied."""
    lanes, format = k.lanes, packing.format
    assert format
    together = packing.pairs_together
    with k.loop(PAIRS // together) as step:
        scale = None
        if _scaled(packing):
            run = step * together // (format.group // 2)
            scale = k.repeat_each(packing.small_integer(k, stream, words, run))
        for i, pair in enumerate(packing.pairs(k, stream, words, step * together, together)):
            value = pair - format.offset if format.offset else pair
            k.store(
                out, at + (step * together + i) * (2 * lanes), value * scale if scale is not None else value
            )
