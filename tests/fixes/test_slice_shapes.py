"""Shapes of slices: those of constant size are told at once, and what is wrong is still found."""

from unittest import mock

import pytest
from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.fixes import slice_shapes


def part(place: UOp, size: UOp) -> UOp:
    return UOp(Ops.SHRINK, src=(UOp.placeholder((8,), dtypes.float32, slot=0), place, size))


@pytest.mark.parametrize("size", [UOp.const(4), UOp.const(4).cast(dtypes.int)])
def test_nothing_is_simplified_to_tell_a_shape(size: UOp) -> None:
    slice_shapes.apply()
    some = part(UOp.special(2, "gidx0") * 4, size)
    with mock.patch.object(UOp, "simplify", autospec=True, side_effect=UOp.simplify) as simplify:
        assert some._shape == (4,) and not simplify.called
        assert slice_shapes._stock_shape(some) == (4,) and simplify.called


def test_a_slice_that_is_not_in_its_buffer_is_found() -> None:
    slice_shapes.apply()
    assert part(UOp.const(3), UOp.const(5))._shape == (5,)
    with pytest.raises(ValueError):
        part(UOp.const(4), UOp.const(5)).shape  # noqa: B018
