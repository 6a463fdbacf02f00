"""The orders in which the activations of several tokens lie, (tokens, cols)."""

from __future__ import annotations

from typing import Literal

from tinygrad import UOp

from engine.targets.nvidia.kernels.products.matmul import fragment_index
from engine.targets.nvidia.kernels.products.small_batch import column_index
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of

Order = Literal["fragments", "rows", "columns"]
"""Fragments of `matmul`; rows of units_of(cols) * UNIT elements, for products with experts; columns of
`small_batch`."""


def _place_in_rows(token: UOp, column: UOp, cols: int) -> UOp:
    return token * (units_of(cols) * UNIT) + column


PLACES = {"fragments": fragment_index, "rows": _place_in_rows, "columns": column_index}
"""The index of an activation, from its token, its column and the number of columns."""
