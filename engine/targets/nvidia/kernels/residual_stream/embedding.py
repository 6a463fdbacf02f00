"""The first kernel of a step: rows of the embedding matrix start the residual stream."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from tinygrad import UOp

from engine.kernels.kernel import Kernel, Run
from engine.targets.nvidia.kernels.angles import angle_row
from engine.targets.nvidia.kernels.attention.kv_cache import LENGTH_UNIT
from engine.targets.nvidia.kernels.uops import (
    INDEX,
    after_store,
    all_of,
    chain,
    f32,
    finish,
    load,
    load_index,
    load_run,
    shared,
    store,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, permuted


class Positions(NamedTuple):
    """A matrix with a row for each position, which is added to the embedding of the token there: its layout and
    rows."""

    layout: WeightLayout
    rows: int

    def quarter(self, planes: Sequence[UOp], position: UOp, units: int, unit: UOp, quarter: UOp) -> list[UOp]:
        """A quarter of a unit of the row of a position, int32, or of the last row."""
        row = position.maximum(0).minimum(self.rows - 1).cast(INDEX)
        loaded = self.layout.load_quarter(planes, row, units, unit, quarter)
        return list(self.layout.quarter(loaded, quarter))


def _planes_of(positions: Positions | None, cols: int) -> Run:
    return "of_positions", len(positions.layout.shapes(positions.rows, cols)) if positions else 0


@functools.cache
def embed(
    layout: WeightLayout, vocab: int, cols: int, n_norm_sums: int, copies: int, context: int,
    halves: tuple[int, ...], scale: float = 1.0, positions: Positions | None = None,
) -> Kernel:  # fmt: skip
    """Starts the residual stream of a decode step with the token's row times `scale`, and looks up the position's
    angles in the tables of each kind of layers, which has so many pairs: `halves`. Buffers: the outs of `add_residual`
    (stream; squares, n_norm_sums partial sums of them; `copies` vectors for the first products); angles, for each kind
    cos and sin of the angles, float32 (2 * half,); state, int32 (3,): token, position and sequence; tables, for each
    kind those of cos and of sin, float32 (context, half) (`angle_row`); norms, for each copy the first norm's weight
    times the input_scale, float32 (cols,); the matrix's planes; if what is added to it is of `positions`, those of
    their matrix. Tokens outside the vocabulary are clamped."""
    units = units_of(cols)
    quarters, kinds = UNIT // QUARTER, len(halves)
    assert n_norm_sums >= quarters
    threads = min(units, 256)
    steps, length = -(-units // threads), -(-context // LENGTH_UNIT) * LENGTH_UNIT

    def kernel(
        stream: UOp, squares: UOp, copies: Sequence[UOp], angles: Sequence[UOp], state: UOp, tables: Sequence[UOp],
        norms: Sequence[UOp], planes: Sequence[UOp], of_positions: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        thread, quarter = UOp.special(threads, "lidx0"), UOp.special(quarters, "gidx0")
        token = load_index(state, 0, vocab)
        stores, own_squares = [], []
        for s in range(steps):
            unit = thread + s * threads
            inside = None if (s + 1) * threads <= units else unit < units
            safe = unit if inside is None else inside.where(unit, 0)
            values = scaled(
                layout.quarter(layout.load_quarter(planes, token, units, safe, quarter), quarter), scale
            )
            if positions:
                added = positions.quarter(of_positions, load(state, 1), units, safe, quarter)
                values = [a + b for a, b in zip(values, added, strict=True)]
            for j, value in enumerate(values):
                column = unit * UNIT + quarter * QUARTER + j
                ok = all_of(inside, None if cols % UNIT == 0 else column < cols)
                stores.append(store(stream, column, value, ok))
                for out, weight in zip(copies, norms, strict=True):
                    stores.append(store(out, permuted(column, cols), value * load(weight, column, ok), ok))
                own_squares.append(value * value if ok is None else ok.where(value * value, f32(0)))
        position = load_index(state, 1, context)
        for kind, half in enumerate(halves):
            for i in range(-(-half // threads)):
                k = thread + i * threads
                ok = quarter.eq(0) & (k < half)
                for j, table in enumerate(tables[2 * kind : 2 * kind + 2]):
                    row = angle_row(table, half, length, position, state, 2)
                    value = load(table, row * half + k, ok)
                    stores.append(store(angles[kind], k + j * half, value, ok))
        sums = after_store(shared(threads, slot=0), thread, chain(own_squares))
        total = tree(load_run(sums, 0, threads))
        each = -(-n_norm_sums // quarters)  # that this block stores: the total, then zeros
        for i in range(-(-each // threads)):
            k = thread + i * threads
            index = k * quarters + quarter
            ok = (k < each) & (index < n_norm_sums)
            stores.append(store(squares, index, k.eq(0).where(total, f32(0)), ok))
        return finish(f"embed_{layout.name}_{cols}", stores)

    outputs = "stream", "squares", ("copies", copies), ("angles", kinds)
    planes = ("planes", len(layout.shapes(vocab, cols))), _planes_of(positions, cols)
    return Kernel(kernel, outputs, ("state", ("tables", 2 * kinds), ("norms", copies), *planes))


def scaled(values: Sequence[UOp], scale: float) -> list[UOp]:
    """The values times `scale`."""
    return list(values) if scale == 1.0 else [value * f32(scale) for value in values]


@functools.cache
def reply_tokens(rows: int, first: int, has_places: bool) -> Kernel:
    """Makes the tokens of replies those of a step's rows from `first` on, and if it `has_places` their positions, too.
    Buffers: ids, the step's tokens, int32; places, their positions, int32; state, that of the replies
    (`StepRows`)."""

    def kernel(ids: UOp, places: UOp | None, state: UOp) -> UOp:
        row = UOp.special(rows, "lidx0")
        stores = [store(ids, first + row, load(state, row))]
        if places is not None:
            stores.append(store(places, first + row, load(state, row + rows)))
        return finish(f"reply_tokens_{rows}_{first}", stores)

    return Kernel(kernel, ("ids", has_places and "places"), ("state",))


@functools.cache
def embed_prompt(
    layout: WeightLayout, tokens: int, vocab: int, cols: int, scale: float, has_pictures: bool = False,
    positions: Positions | None = None, first_place: int = 0,
) -> Kernel:  # fmt: skip
    """Starts the residual stream of prefill with the tokens' rows times `scale`. Buffers: stream, float32 (tokens,
    cols); ids, the tokens, int32 (tokens,); the matrix's planes; if it `has_pictures`, what negative tokens have in
    place of rows, float32 (tokens, cols); if what is added to it is of `positions`, places, those of the tokens, int32,
    from `first_place` on, and the planes of their matrix. Tokens outside the vocabulary are clamped."""
    units = units_of(cols)
    quarters = units * (UNIT // QUARTER)
    threads = min(quarters, 128)

    def kernel(
        stream: UOp, ids: UOp, planes: Sequence[UOp], pictures: UOp | None, places: UOp | None,
        of_positions: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        thread, token = UOp.special(threads, "lidx0"), UOp.special(tokens, "gidx0")
        chunk = UOp.special(-(-quarters // threads), "gidx1")
        index = chunk * threads + thread
        safe = index if quarters % threads == 0 else index.minimum(quarters - 1)
        id = load(ids, token)
        row = id.maximum(0).minimum(vocab - 1).cast(thread.dtype)
        values = scaled(
            layout.quarter(layout.load_quarter(planes, row, units, safe // 4, safe % 4), safe % 4), scale
        )
        if positions and places is not None:
            place = load(places, token + first_place)
            added = positions.quarter(of_positions, place, units, safe // 4, safe % 4)
            values = [a + b for a, b in zip(values, added, strict=True)]
        stores = []
        for j, value in enumerate(values):
            column = index * QUARTER + j
            ok = None if cols % (threads * QUARTER) == 0 else column < cols
            if pictures is not None:
                of_picture = id < 0
                shown = load(pictures, token * cols + column, all_of(of_picture, ok))
                value = of_picture.where(shown, value)
            stores.append(store(stream, token * cols + column, value, ok))
        return finish(f"prefill_embed_{layout.name}_{tokens}_{cols}", stores)

    planes, of_positions = ("planes", len(layout.shapes(vocab, cols))), _planes_of(positions, cols)
    inputs = "ids", planes, has_pictures and "pictures", positions is not None and "places", of_positions
    return Kernel(kernel, ("stream",), inputs)
