"""tinygrad 0.14.0: the shape of a slice is told without simplifying where it begins.

A kernel's loads and stores of several elements are slices. To tell the shape of one, tinygrad simplifies the place of
its first element, and whether it lies in the buffer. At the end of a kernel's way to code, the second of two loops
depends on the first, so each such place has most of the kernel among its sources: kernels of attention took three
quarters of their time there. Of a slice of constant size, this size is the shape.

The shape of most other nodes is that of all their sources. tinygrad looks for that last.
"""

from __future__ import annotations

from typing import Any

from tinygrad.uop.ops import GroupOp, Ops, UOp

from engine.fixes import once

_property = UOp.__dict__["_shape"]
_stock_shape = _property.fxn


@once("Shapes of slices")
def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError if another version is installed."""
    _property.fxn = _shape


def _shape(uop: UOp) -> Any:
    """In the place of UOp._shape. The stock one also checks that a slice at a constant place is in the buffer."""
    if uop.op is Ops.SHRINK:
        whole = uop.src[0]._shape
        places, sizes = (_constants(u.src if u.op is Ops.STACK else (u,)) for u in uop.src[1:])
        if whole is not None and None in places and None not in sizes and len(whole) == len(sizes):
            return sizes
    elif uop.op in GroupOp.Broadcastable or uop.op in GroupOp.Unary or uop.op is Ops.CAST:
        shapes = [source._shape for source in uop.src]
        if shapes[0] is not None and all(shape == shapes[0] for shape in shapes):
            return shapes[0]
    return _stock_shape(uop)


def _constants(uops: tuple[UOp, ...]) -> tuple[int | None, ...]:
    """The value of each one that is a constant, which at the end of the way is cast to its type."""
    bases = (u.src[0] if u.op is Ops.CAST else u for u in uops)
    return tuple(u.val if u.op is Ops.CONST else None for u in bases)
