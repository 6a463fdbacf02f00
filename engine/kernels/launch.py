"""A sequence of kernels over fixed buffers, compiled once and replayed as one graph of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType

from tinygrad import Device, Tensor, UOp
from tinygrad.codegen import to_program_key
from tinygrad.dtype import DType
from tinygrad.engine import realize
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.uop.ops import Ops

from engine.disk_cache import disk_cache, source_digest

Kernel = Callable[..., UOp]


class Launches:
    """Kernels in the order in which they are added. They need no scheduler: each is a program already, each
    tensor a buffer that is there, and whatever changes from one replay to the next lies in these buffers."""

    def __init__(self) -> None:
        self.calls: list[UOp] = []

    def add(self, kernel: Kernel, *buffers: Tensor) -> None:
        """`kernel` is called with a placeholder for each buffer; the same function always means the same
        kernel. The buffers are realized tensors, whole, and every one of them is used."""
        shapes = tuple((int(b.numel()), b.dtype) for b in buffers)
        self.calls.append(called(_program(kernel, shapes), [b.uop.base for b in buffers]))

    @property
    def linear(self) -> UOp:
        return UOp(Ops.LINEAR, src=tuple(self.calls))

    def compiled(self) -> UOp:
        """The sequence as a LINEAR of calls, what is not compiled yet compiled."""
        return compiled(self.linear)

    def captured(self) -> Callable[[], None]:
        """Compiles what is not compiled yet; what comes back launches the sequence and does not wait."""
        linear = self.compiled()
        if Device[Device.DEFAULT].graph is not None:
            linear = graph_split_rewrite(linear, max_batch_size=0)
        return functools.partial(realize.run_linear, linear, jit=True)

    def __len__(self) -> int:
        return len(self.calls)


def called(kernel: UOp, buffers: Sequence[UOp]) -> UOp:
    """A call of a graph, or of the program that it became, with buffers."""
    # Not by the program's own `call`: it looks for loops left open, and takes those of compiled kernels for such.
    call = UOp(Ops.SINK).call(*buffers)
    return call.replace(src=(_compiled.get(kernel, kernel), *call.src[1:]))


def compiled(linear: UOp) -> UOp:
    """A sequence of calls with programs in place of graphs."""
    compile_all([linear])
    calls = ((call, call.src[0]) for call in linear.src)
    return linear.replace(src=tuple(c.replace(src=(_compiled.get(ast, ast), *c.src[1:])) for c, ast in calls))


def compile_all(linears: Sequence[UOp]) -> None:
    """Compiles the kernels of sequences that are not compiled yet, all at once: several processes share them."""
    todo = {call.src[0]: call for linear in linears for call in linear.src if call.src[0] not in _compiled}
    graphs = [graph for graph in todo if graph.op is Ops.SINK]
    if not graphs:
        return
    # What takes long is begun first, or all would wait for the last of it.
    graphs.sort(key=lambda graph: len(graph.toposort()), reverse=True)
    done = realize.compile_linear(UOp(Ops.LINEAR, src=tuple(todo[graph] for graph in graphs)))
    for graph, call in zip(graphs, done.src, strict=True):
        _compiled[graph] = call.src[0]
        if name := _unknown.pop(graph, ""):
            disk_cache().put("kernels", name, to_program_key(graph, Device[Device.DEFAULT].renderer))


# To build a kernel's graph and to take its digest, by which tinygrad knows its program, takes Python longer than
# all else in the start of a model whose programs are kept. So programs are known by what decides about the
# graph as well, and the graph is not built again.

_compiled: dict[UOp, UOp] = {}  # graphs, and the programs that they became
_unknown: dict[UOp, str] = {}  # graphs that are not compiled yet, and what they are to be known by


@functools.cache
def _program(kernel: Kernel, shapes: tuple[tuple[int, DType], ...]) -> UOp:
    placeholders = (UOp.placeholder((n,), dtype, slot=i) for i, (n, dtype) in enumerate(shapes))
    return known_or_made((kernel, shapes), lambda: kernel(*placeholders))


def known_or_made(description: tuple[object, ...], make: Callable[[], UOp]) -> UOp:
    """The program that was compiled of the graph with this `description`, if it is kept; else the graph, which
    `make` returns, for `compile_all`."""
    try:
        target = str(Device[Device.DEFAULT].renderer.target)
        name = repr((source_digest(), target, described(description)))
    except TypeError:
        name = ""
    if name and (key := disk_cache().get("kernels", name)):
        program = realize.to_program_cache.get(key)
        if program is not None:
            return program
    graph = make()
    if name:
        _unknown[graph] = name
    return graph


def described(value: object) -> str:
    """All that decides about what a kernel's function does, in words: where it is written and, where it was made
    by another function, what that one was called with. Raises TypeError for what cannot be told."""
    if value is None or isinstance(value, bool | int | float | str | bytes | DType):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        captured = (f"{name}={described(cell.cell_contents)}" for name, cell in cells)
        if value.__defaults__ or value.__kwdefaults__:
            raise TypeError("defaults are not told")
        return f"{value.__module__}.{value.__qualname__}({', '.join(captured)})"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{field.name}={described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(parts)})"
    raise TypeError(f"{type(value).__name__} cannot be told")
