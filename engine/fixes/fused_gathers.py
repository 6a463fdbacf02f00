"""tinygrad 0.14.0: a kernel that sums over gathered rows reads them where they lie.

`x[indices]` is a sum over all rows of x, of which all but one are multiplied by zero. tinygrad makes a load of this sum
when it compiles a kernel. Before that, when it decides what a kernel computes, it takes it for a sum, and gives it a
kernel and a buffer of its own if another sum reads it. So attention over gathered keys would copy them first. With
this fix the sum is a load already when kernels are made of the graph.
"""

from __future__ import annotations

import tinygrad.schedule.rangeify as rangeify
from tinygrad.codegen.simplify import pm_load_collapse

from engine.fixes import once

_stock = rangeify.pm_reduce_simplify


@once("Gathers within kernels")
def apply() -> None:
    """Changes tinygrad in this process."""
    rangeify.pm_reduce_simplify = _stock + pm_load_collapse
