"""Where a position's angles are in the tables of a rotary embedding."""

from __future__ import annotations

from tinygrad import UOp

from engine.targets.nvidia.kernels.uops import INDEX, load


def angle_row(table: UOp, half: int, length: int, position: UOp, state: UOp, sequence_at: UOp | int) -> UOp:
    """The row of a table with rows of `half` angles. It is one for all sequences, of up to `length` rows, or has as
    many for each: those whose tokens have other positions than their places (`engine.runtime.pictures`). `state` has
    the sequence at an index."""
    if table.max_numel() <= length * half:
        return position
    return position + load(state, sequence_at).cast(INDEX) * length
