"""A sequence of GPU kernels over fixed buffers, launched as one graph of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tinygrad import Device, Tensor, UOp
from tinygrad.dtype import DType
from tinygrad.engine import realize
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import call_of, compile_calls, compiled, program_or_graph
from engine.kernels.kernel import Kernel

Shapes = tuple[tuple[int, DType], ...]
"""The size and the type of each buffer."""


class KernelSequence:
    """Kernels in the order in which they are added. tinygrad does not schedule them: each one is a kernel already, each
    tensor is an allocated buffer, and values that change between two sequence are in these buffers."""

    def __init__(self) -> None:
        self.calls: list[UOp] = []

    def add(self, kernel: Kernel, **buffers: Tensor | Sequence[Tensor] | None) -> None:
        """Adds a call of `kernel` with its buffers by name, a sequence for a run of them; None is no buffer. They are
        realized, whole tensors, and the kernel uses every one of them. Raises ValueError as `Kernel.by_slot`."""
        uops = [b.uop.base for b in kernel.by_slot(buffers)]
        # A tensor takes longer to tell its own.
        shapes = tuple((int(uop.max_numel()), uop.dtype) for uop in uops)
        self.calls.append(call_of(_program(kernel, shapes), uops))

    @property
    def linear(self) -> UOp:
        """The calls as a LINEAR."""
        return UOp(Ops.LINEAR, src=tuple(self.calls))

    def compile(self) -> UOp:
        """Compiles the kernels that are not compiled yet: the LINEAR, with programs in place of graphs."""
        linear = compile_calls(self.linear)
        for call in linear.src:  # CUDA's graphs take no other arguments than a program has
            program, *buffers = call.src
            assert len(program.arg.globals) == len(buffers), (
                f"{program.arg.name} does not use all its buffers"
            )
        return linear

    def run(self, first: int, end: int) -> None:
        """Runs some of the kernels, one after the other."""
        realize.run_linear(compile_calls(UOp(Ops.LINEAR, src=tuple(self.calls[first:end]))), jit=True)

    def capture(self) -> Callable[[], None]:
        """Compiles the sequence and makes a graph of it. The result launches the graph and does not wait for it."""
        linear = self.compile()
        if Device[Device.DEFAULT].graph is not None:
            linear = graph_split_rewrite(linear, max_batch_size=0)
            for call in linear.src:
                if call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph":
                    realize.get_graph_runtime(call.src[0], ())  # tinygrad would make it at the first launch
        return functools.partial(realize.run_linear, linear, jit=True)

    def __len__(self) -> int:
        return len(self.calls)


_known: dict[tuple[Kernel, Shapes], UOp] = {}


def _program(kernel: Kernel, shapes: Shapes) -> UOp:
    """The program of a kernel for buffers of these sizes and types, or its graph while that is not compiled: a graph
    takes a megabyte, and nothing reads it any more."""
    known = _known.get((kernel, shapes))
    if known is None:
        known = program_or_graph((kernel, shapes), _graph, kernel, shapes, size=sum(n for n, _ in shapes))
    _known[kernel, shapes] = compiled(known)
    return _known[kernel, shapes]


@contextmanager
def forgetting() -> Iterator[None]:
    """At its end, forgets the programs that were compiled or loaded meanwhile, as those of a search's candidates: they
    are on disk, and what was captured keeps its own."""
    tables: tuple[dict[Any, Any], ...] = (_known, realize.to_program_cache, realize.runtime_cache)
    before = [set(table) for table in tables]
    try:
        yield
    finally:
        for table, keys in zip(tables, before, strict=True):
            for key in table.keys() - keys:
                del table[key]


def _graph(kernel: Kernel, shapes: Shapes) -> UOp:
    placeholders = (UOp.placeholder((n,), dtype, slot=i) for i, (n, dtype) in enumerate(shapes))
    return kernel.graph(*placeholders)
