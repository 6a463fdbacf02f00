"""tinygrad 0.14.0: the integers of a kernel's indices get their width in one pass over all of them.

An index is lowered where it is used, and tinygrad lowers its whole expression there. Indices of a kernel share most of
their expressions, which so were lowered again and again: a sixth of the time that a kernel of attention took to become
code. Here the results of one rewrite serve the next.
"""

from __future__ import annotations

from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.uop import weak
from tinygrad.uop.ops import GroupOp, Ops, RewriteContext

from engine.fixes import once

_stock_lower_sources = weak.lower_weak_srcs


@once("Lowering of indices")
def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError if another version is installed."""
    weak.lower_weak_srcs = _lower_sources


def _lower_sources(shared: dict[str, RewriteContext] | None, uop: UOp) -> UOp | None:
    """In the place of tinygrad's `lower_weak_srcs`. `shared`: one for all of a kernel."""
    shared = {} if shared is None else shared
    rewrite = shared.setdefault("lowered", RewriteContext(weak.pm_lower_weak, None))

    def lower(source: UOp) -> UOp:
        lowered: Any = rewrite.unified_rewrite(source)
        is_weak_cast = lowered.op is Ops.CAST and lowered.dtype in dtypes.weaks
        return lowered.src[0] if is_weak_cast else lowered

    if uop.op in GroupOp.Comparison:  # its sources get a common width
        result = lower(uop)
    else:
        result = uop.replace(src=tuple(lower(s) if s.dtype in dtypes.weaks else s for s in uop.src))
    return None if result is uop else result
