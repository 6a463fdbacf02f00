"""A stem (`engine.description.vision.Stem`) for so many patches: tiles have fewer than the whole picture, and tables of
places become smaller as the published code makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.description.encoder_input import Floats, resized_table
from engine.description.sublayers import Vector
from engine.description.vision import PatchAttention, PatchSublayer, Stem


def stem_of(stem: Stem, side: int, vector: Callable[[Vector], Floats]) -> tuple[Stem, dict[Vector, Floats]]:
    """A stem with `side` rows and columns of patches, and what its attention and its places read. `vector` reads one of
    the file's. In place of a table `by_rows` or `by_columns` of n rows or columns, it is the table's vectors for each
    query: float32 (n queries, head_dim, n keys)."""
    made = dict[Vector, Floats]()

    def table(of: Vector, head_dim: int, n: int) -> Vector:
        rows = _stretched(vector(of).reshape(-1, head_dim), 2 * n - 1)
        key = replace(of, size=rows.size)
        apart = np.arange(n)[:, None] - np.arange(n) + n - 1
        made[key] = np.ascontiguousarray(rows[apart].transpose(0, 2, 1))
        return key

    def sized(sublayer: PatchSublayer) -> PatchSublayer:
        a = sublayer.operator
        if not isinstance(a, PatchAttention) or not a.by_rows or not a.by_columns:
            return sublayer
        n = stem.window if a.windowed else side
        by_rows, by_columns = (table(of, a.head_dim, n) for of in (a.by_rows, a.by_columns))
        return replace(sublayer, operator=replace(a, by_rows=by_rows, by_columns=by_columns))

    places = vector(stem.positions).reshape(-1, stem.dim)
    if side != stem.side:
        places = resized_table(places, stem.side, side)
    positions = replace(stem.positions, size=places.size)
    made[positions] = places
    return replace(stem, side=side, positions=positions, sublayers=tuple(map(sized, stem.sublayers))), made


def _stretched(table: Floats, count: int) -> Floats:
    """A table of numbers in a row, stretched linearly without aligned corners: (count, dim)."""
    n = len(table)
    at = np.clip((np.arange(count) + 0.5) * n / count - 0.5, 0, n - 1)
    low = np.minimum(at.astype(int), n - 1)
    share = (at - low)[:, None]
    rows: Floats = ((1 - share) * table[low] + share * table[np.minimum(low + 1, n - 1)]).astype(np.float32)
    return rows
