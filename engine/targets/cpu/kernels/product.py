"""Products of quantized activations with matrices in the CPU's layout, for one token and for tiles of tokens.

A kernel computes `lanes` rows side by side, two columns at a time. It adds integers within a group of columns and
scales once a group. Float matrices take float32 activations.

With one token, the time goes to memory and to unpacking weights. So integers are multiplied as they are stored, and
offsets are applied to sums of activations. With tiles of tokens, weights are unpacked once for all tokens, a span of
columns at a time that stays in the L1 cache. With tiles of fewer tokens than lanes (decode of several conversations),
they stay in registers. Weights in 16-bit floats may be rounded to integers for that (`rounded`), of 13 bits with a
scale for 32 columns: an error like that of their own type, and twice the products at a time.

A kernel is compiled for a type of matrices, not for a shape: it reads the sizes from a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import Activations, buffer_names
from engine.targets.cpu.kernels.kernel_builder import F32, I16, I32, Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.lanes import MOST_TILES
from engine.targets.cpu.kernels.step_state import TILES
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.weight_layout import PAIRS, LaneLayout, as_float

ROUNDED = ("values", "scales")
"""The buffers of `Activations` that products of rounded weights read."""

_MAX_ROUNDED = 4095  # the sum of 32 products with activations of up to 16383 must fit 32 bits


def shape_of(
    rows: int, cols: int, layout: LaneLayout, added: bool, first: int = 0, out_rows: int = 0
) -> list[int]:
    """The sizes that a product reads, int32 (5,): groups of rows; blocks in a row; `first`, the row of the output that
    the matrix's first row gives; rows of the output; rows of what is `added` for each token, or 0 if all tokens add the
    same."""
    groups = layout.groups(rows)
    out_rows = out_rows or groups * layout.lanes
    return [groups, cols // layout.block, first, out_rows, out_rows * added]


def span_of(cols: int) -> int:
    """Units of columns that a product with tiles unpacks at a time."""
    return next(n for n in (8, 4, 2, 1) if cols // UNIT % n == 0)


@functools.cache
def product(
    layout: LaneLayout,
    tile: int,
    span: int = 1,
    biased: bool = False,
    rounded: bool = False,
    most: int = MOST_TILES,
) -> KernelFunction:
    """out = activations @ matrix.T + added, where `added` is a residual stream, a bias or zeros. Buffers: out, float32
    (tokens, out_rows); the sizes (`shape_of`); the state if tile is more than 1; the activations (`buffer_names`); what
    is added, float32 (tokens or 1, out_rows); a bias that is added too if `biased`, float32 (out_rows,); the matrix's
    stream. `span`: see `span_of`; unused if tile is 1. `rounded`: of a float matrix, whose columns are a multiple of
    32, with a tile of `lanes` tokens and quantized activations. `most`: tiles of a step with more tokens than lanes."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k, rest = KernelBuilder(layout.lanes), list(buffers)
        groups, blocks, offset, out_rows, added_rows = (k.index(shape, i) for i in range(5))
        tiles: Index = k.index(rest.pop(0), TILES) if tile > 1 else 1
        names = ROUNDED if rounded else buffer_names([layout], tile)
        inputs = {name: rest.pop(0) for name in names}
        x = Activations(tile, blocks * layout.block, **inputs)
        added, *bias, stream = rest
        assert len(bias) == biased
        first, count = even_share(groups, part, parts)
        with k.loop(count) as i:
            group = first + i
            row = offset + group * layout.lanes
            rows = GroupOfRows(k, layout, stream, group, blocks, x)

            def finish(token: Index, total: UOp) -> None:
                for vector in bias:
                    total = total + k.vector(vector, row)
                k.store(out, token * out_rows + row, total + k.vector(added, token * added_rows + row))

            if layout.format is None and not rounded:
                with k.loop(tiles) as tile_number:
                    for t, total in enumerate(products_of_floats(rows, tile_number)):
                        finish(tile_number * tile + t, total)
            elif tile == 1:
                finish(0, products_of_a_token(rows))
            elif tile < layout.lanes:
                with k.loop(tiles) as tile_number:
                    for t, total in enumerate(products_of_few(rows, tile_number)):
                        finish(tile_number * tile + t, total)
            else:
                totals = products_of_tiles(rows, tiles, span, most=most)
                with k.loop(tiles) as tile_number, k.loop(tile) as t:
                    token = tile_number * tile + t
                    finish(token, k.vector(totals, token * layout.lanes))
        return k.finish(f"product_{layout.name}{'_rounded' * rounded}_{tile}")

    return kernel


class GroupOfRows(NamedTuple):
    """`lanes` rows of a matrix, and the activations that they are multiplied by."""

    k: KernelBuilder
    layout: LaneLayout
    stream: UOp
    group: UOp
    blocks: UOp
    x: Activations


def products_of_floats(rows: GroupOfRows, tile_number: Index) -> list[UOp]:
    """The products with each token of a tile, float32 (lanes,)."""
    k, _, stream, group, _, x = rows
    lanes, tile = k.lanes, x.tile
    # Independent sums, since each addition waits for the one before. A few tokens are added in the order of one.
    chains = 4 if tile < lanes else 1
    sums = [k.zeros() for _ in range(chains * tile)]
    with k.loop(x.cols // chains) as step:
        for c in range(chains):
            column = step * chains + c
            weight = as_float(k.vector(stream, (group * x.cols + column) * lanes))
            for token in range(tile):
                s = sums[c * tile + token]
                k.store(s, 0, k.vector(s, 0) + weight * x.float(k, tile_number, column, token))
    return [add(k.vector(s, 0) for s in sums[token::tile]) for token in range(tile)]


def products_of_a_token(rows: GroupOfRows, tile_number: Index = 0) -> UOp:
    """The products with the token of a tile that holds one, float32 (lanes,)."""
    k, layout, stream, group, blocks, x = rows
    lanes, format = k.lanes, layout.format
    assert format
    units = layout.block // UNIT
    n = format.group // 2  # pairs in a group of columns
    together = min(n, max(4, layout.pairs_together))
    total = k.registers(lanes)
    sums = k.registers(2 * lanes, I32)  # two sums for each row: of the even and of the odd pairs
    k.fill(total, 0, UOp.const(0.0, F32))
    with k.loop(blocks) as block, k.loop(units) as u, k.loop(UNIT // format.group) as run:
        at = (group * blocks + block) * layout.block_words
        unit = block * units + u
        words = at + layout.header_words + u * layout.unit_words
        start: UOp = UOp.const(0, I32)
        if format.offset:
            start = x.sum(k, tile_number, unit * (UNIT // format.group) + run, format.group) * -format.offset
        k.fill(sums, 0, start)
        k.fill(sums, lanes, UOp.const(0, I32))
        with k.loop(n // together) as step:
            first = run * n + step * together
            pairs = layout.pairs(k, stream, words, first, together)
            dots = [
                k.multiply_pair(w, x.pair(k, tile_number, unit * PAIRS + first + i, 0))
                for i, w in enumerate(pairs)
            ]
            value = k.vector(sums, 0, 2 * lanes)
            for a, b in zip(dots[::2], dots[1::2], strict=True):
                value = value + k.concat(a, b)
            k.store(sums, 0, value)
        _add_run(rows, [total], [sums], tile_number, at, words, unit, run)
    return k.vector(total, 0)


def products_of_few(rows: GroupOfRows, tile_number: Index) -> list[UOp]:
    """The products with each token of a tile of fewer tokens than lanes, float32 (lanes,)."""
    k, layout, stream, group, blocks, x = rows
    lanes, tile, format = k.lanes, x.tile, layout.format
    assert format
    units, runs = layout.block // UNIT, UNIT // format.group
    n = format.group // 2  # pairs in a group of columns
    together = min(n, max(4, layout.pairs_together))
    totals = [k.zeros() for _ in range(tile)]
    sums = [k.registers(2 * lanes, I32) for _ in range(tile)]
    with k.loop(blocks) as block, k.loop(units) as u, k.loop(runs) as run:
        at = (group * blocks + block) * layout.block_words
        unit, words = block * units + u, at + layout.header_words + u * layout.unit_words
        for s in sums:
            k.fill(s, 0, UOp.const(0, I32), 2 * lanes)
        with k.loop(n // together) as step:
            first = run * n + step * together
            values = [k.vector(s, 0, 2 * lanes) for s in sums]
            pairs = layout.pairs(k, stream, words, first, together)
            if format.offset:
                pairs = [pair - format.offset for pair in pairs]
            for i in range(0, together, 2):
                for t in range(tile):
                    dots = (
                        k.multiply_pair(pairs[i + j], x.pair(k, tile_number, unit * PAIRS + first + i + j, t))
                        for j in range(2)
                    )
                    values[t] = values[t] + k.concat(*dots)
            for s, value in zip(sums, values, strict=True):
                k.store(s, 0, value)
        _add_run(rows, totals, sums, tile_number, at, words, unit, run)
    return [k.vector(total, 0) for total in totals]


def _add_run(
    rows: GroupOfRows,
    totals: Sequence[UOp],
    sums: Sequence[UOp],
    tile_number: Index,
    at: UOp,
    words: UOp,
    unit: UOp,
    run: UOp,
) -> None:
    """Adds a run of columns to the totals of each token of a tile: their integers' `sums`, scaled, less the minima. The
    factors are stored, and the two are added one after the other, so that kernels of one token and of a few round
    alike: tinygrad reorders the products of an expression, and compilers choose which of them they add unrounded."""
    k, layout, stream, _, _, x = rows
    lanes, format = k.lanes, layout.format
    assert format
    scale, minimum = layout.scales(k, stream, at, words, run)
    scale, minimum = _stored(k, scale), None if minimum is None else _stored(k, minimum)
    for t, (total, pair) in enumerate(zip(totals, sums, strict=True)):
        dot = (k.vector(pair, 0) + k.vector(pair, lanes)).cast(F32)
        of_x = _stored(k, scale * x.scale(k, tile_number, unit, t))
        k.store(total, 0, k.vector(total, 0) + dot * of_x)
        if minimum is not None:
            if format.has_nibble_scales:
                of_run = x.run_sum(k, tile_number, unit * (UNIT // format.group) + run, t)
            else:
                of_run = x.scaled_sum(k, tile_number, unit, t)
            k.store(total, 0, k.vector(total, 0) - minimum * of_run)


def _stored(k: KernelBuilder, value: UOp) -> UOp:
    """A vector in registers of its own."""
    registers = k.registers(k.lanes)
    k.store(registers, 0, value)
    return k.vector(registers, 0)


def products_of_tiles(
    rows: GroupOfRows, tiles: Index, span: int, first_tile: Index = 0, most: int = MOST_TILES
) -> UOp:
    """The products with the tokens of up to `most` `tiles`, an array of float32 (tokens, lanes)."""
    k, layout, stream, group, blocks, x = rows
    lanes, tile, format = k.lanes, x.tile, layout.format
    units = blocks * layout.block // UNIT
    totals = k.registers((most if isinstance(tiles, UOp) else tiles) * tile * lanes)
    weights = k.registers(span * UNIT * lanes, I16)
    scales = k.registers(span * lanes)
    # Runs with minima of their own in a unit.
    runs = UNIT // format.group if format and format.has_nibble_scales else 1
    minima = k.registers(span * runs * lanes) if format and "m" in format.scales else None
    with k.loop(tiles) as tile_number, k.loop(tile) as t:
        k.fill(totals, (tile_number * tile + t) * lanes, UOp.const(0.0, F32))
    with k.loop(units // span) as s:
        with k.loop(span) as i:
            unit = s * span + i
            if format:
                _unpack(rows, unit, weights, scales, minima, i)
            else:
                at = (group * blocks + unit * UNIT) * lanes
                k.store(scales, i * lanes, _round_unit(k, stream, at, weights, i * (UNIT * lanes)))
        with k.loop(tiles) as tile_number, k.loop(span) as i:
            unit, of_x = s * span + i, first_tile + tile_number
            sums = [k.zeros(2 * lanes, I32) for _ in range(tile // 2)]  # two tokens side by side
            # Each step adds one product to a sum, which is one instruction of x86 with VNNI: of several products,
            # compilers would add the products first.
            with k.loop(PAIRS) as pair:
                values = [k.vector(pair_sums, 0, 2 * lanes) for pair_sums in sums]
                w = k.vector(weights, (i * PAIRS + pair) * (2 * lanes), 2 * lanes)
                for two in range(tile // 2):
                    xs = (x.pair(k, of_x, unit * PAIRS + pair, 2 * two + t) for t in range(2))
                    dots = (k.multiply_pair(w, pair_x) for pair_x in xs)
                    values[two] = values[two] + k.concat(*dots)
                for pair_sums, value in zip(sums, values, strict=True):
                    k.store(pair_sums, 0, value)
            for t in range(tile):
                dot = k.vector(sums[t // 2], t % 2 * lanes)
                result = dot.cast(F32) * (k.vector(scales, i * lanes) * x.scale(k, of_x, unit, t))
                if minima is not None and runs > 1:
                    for run in range(runs):
                        minimum = k.vector(minima, (i * runs + run) * lanes)
                        result = result - minimum * x.run_sum(k, of_x, unit * runs + run, t)
                elif minima is not None:
                    result = result - k.vector(minima, i * lanes) * x.scaled_sum(k, of_x, unit, t)
                at_total = (tile_number * tile + t) * lanes
                k.store(totals, at_total, k.vector(totals, at_total) + result)
    return totals


def _unpack(rows: GroupOfRows, unit: UOp, weights: UOp, scales: UOp, minima: UOp | None, place: UOp) -> None:
    """Stores the weights of a unit at a place of these arrays, and its scale and minima."""
    k, layout, stream, group, blocks, _ = rows
    lanes, units = k.lanes, layout.block // UNIT
    at = (group * blocks + unit // units) * layout.block_words
    words = at + layout.header_words + unit % units * layout.unit_words
    _unpack_unit(k, layout, stream, words, weights, place * (UNIT * lanes))
    scale, minimum = layout.scales(k, stream, at, words, None if _scales_in_weights(layout) else 0)
    k.store(scales, place * lanes, scale)
    if minima is not None and minimum is not None:
        k.store(minima, place * lanes, minimum)
    elif minima is not None and layout.format:
        runs = UNIT // layout.format.group
        for run in range(runs):
            k.store(minima, (place * runs + run) * lanes, layout.minimum(k, stream, at, words, run))


def _scales_in_weights(layout: LaneLayout) -> bool:
    """Whether unpacked weights include their small scales: a unit has several of them."""
    return layout.format is not None and layout.format.group < UNIT


def _unpack_unit(k: KernelBuilder, layout: LaneLayout, stream: UOp, words: UOp, out: UOp, at: Index) -> None:
    """Stores a unit's weights as pairs of columns, int16 (16, 2 * lanes), with the offset subtracted."""
    lanes, format = k.lanes, layout.format
    assert format
    together = layout.pairs_together
    with k.loop(PAIRS // together) as step:
        scale = None
        if _scales_in_weights(layout):
            run = step * together // (format.group // 2)
            scale = k.repeat_each(layout.small_scale(k, stream, words, run))
        for i, pair in enumerate(layout.pairs(k, stream, words, step * together, together)):
            value = pair - format.offset if format.offset else pair
            k.store(
                out, at + (step * together + i) * (2 * lanes), value * scale if scale is not None else value
            )


def _round_unit(k: KernelBuilder, stream: UOp, first: UOp, out: UOp, at: Index) -> UOp:
    """Stores a unit's floats as pairs of columns, int16 (16, 2 * lanes), and gives the scale of each row."""
    lanes, largest = k.lanes, k.registers(k.lanes)
    k.fill(largest, 0, UOp.const(1e-30, F32))
    with k.loop(UNIT) as column:
        v = as_float(k.vector(stream, first + column * lanes))
        k.store(largest, 0, k.vector(largest, 0).maximum(v.maximum(v * -1.0)))
    inverse = k.vector(largest, 0).reciprocal() * float(_MAX_ROUNDED)
    with k.loop(PAIRS) as pair:
        # A cast truncates, so this rounds to the nearest integer.
        both = [
            (as_float(k.vector(stream, first + (pair * 2 + i) * lanes)) * inverse + 32768.5).cast(I32) - 32768
            for i in range(2)
        ]
        k.store(out, at + pair * (2 * lanes), k.interleave(*both).cast(I16))
    return k.vector(largest, 0) * (1 / _MAX_ROUNDED)
