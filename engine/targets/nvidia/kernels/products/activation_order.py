"""The orders in which the activations of several tokens lie, (tokens, cols)."""

from __future__ import annotations

from typing import Literal

from tinygrad import UOp

from engine.targets.nvidia.kernels.products.copied_matmul import halves_index
from engine.targets.nvidia.kernels.products.eights import eights_index
from engine.targets.nvidia.kernels.products.matmul import fragment_index, spread
from engine.targets.nvidia.kernels.products.small_batch import column_index
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of

Order = Literal["fragments", "eights", "halves", "rows", "columns"]
"""Fragments of `matmul`; by eight tokens, for `warpgroup_matmul`; halves, as rows of a float16 matrix lie, for
`copied_matmul`; rows of units_of(cols) * UNIT elements, for products with experts; columns of `small_batch`."""


def _place_in_rows(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an element in rows whose columns lie in the order of a product's steps and threads (`spread`)."""
    units = units_of(cols)
    step, thread = spread(column // UNIT, column % UNIT // QUARTER, units)
    return ((token * units + step) * 4 + thread) * QUARTER + column % QUARTER


PLACES = {
    "fragments": fragment_index,
    "eights": eights_index,
    "halves": halves_index,
    "rows": _place_in_rows,
    "columns": column_index,
}
"""The index of an activation, from its token, its column and the number of columns."""
