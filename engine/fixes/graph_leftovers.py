"""tinygrad 0.14.0 on CUDA: a graph lets go of what it was made of.

tinygrad keeps each graph twice, as CUDA's template and as what is launched, and beside them the arguments, buffers and
dependencies of all of its kernels, so that it can launch the graph with others. Most graphs have none that change: what
is launched then needs nothing else (CUDA Driver API, cuGraphInstantiate). A server captures a hundred steps of a
hundred kernels, and each kernel took 20 kB of the process's memory.
"""

from __future__ import annotations

from typing import Any

import tinygrad.runtime.autogen.cuda as cuda
from tinygrad.device import DepsTracker
from tinygrad.runtime.graph.cuda import CUDAGraph
from tinygrad.runtime.ops_cuda import check

from engine.fixes import once

_make: Any = None


@once("What graphs let go of")
def apply() -> None:
    """Changes tinygrad in this process. To be called after what else changes how graphs are made."""
    global _make
    _make, CUDAGraph.__init__ = CUDAGraph.__init__, _init


def _init(self: CUDAGraph, *args: Any, **kwargs: Any) -> None:
    _make(self, *args, **kwargs)
    if self.updatable:
        return
    check(cuda.cuGraphDestroy(self.graph))
    del self.graph
    self.nodes, self.calls, self.runtimes, self.uop_replace = [], [], [], []
    self.deps = DepsTracker()
