"""Compiles kernels, several at once, and reuses the programs that earlier runs left in the disk cache.

Building a kernel's graph, and computing the digest by which tinygrad identifies its program, takes Python longer than
everything else in the start of a model whose programs are cached. So a program is also identified by what its graph
follows from: the function that builds it, the function's arguments, and the source. Then its graph is not built again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType

from tinygrad import Device, UOp
from tinygrad.codegen import to_program_key
from tinygrad.dtype import DType
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops

from engine.disk_cache import disk_cache, source_digest
from engine.errors import PreemptedError

KernelFunction = Callable[..., UOp]
"""A function that takes placeholders of buffers and returns a kernel's graph: a kernel of a CPU."""

_programs: dict[UOp, UOp] = {}  # the programs of the graphs that this process has compiled
_cache_keys: dict[UOp, str] = {}  # graphs to compile, and the keys of their programs in the disk cache
_interrupted: Callable[[], bool] | None = None


@contextmanager
def interruptible(interrupted: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile, `compile_all` raises PreemptedError once `interrupted`. Calling it again goes on: what was compiled by
    then is kept."""
    global _interrupted
    _interrupted = interrupted
    try:
        yield
    finally:
        _interrupted = None


def call_of(kernel: UOp, buffers: Sequence[UOp]) -> UOp:
    """A call of a kernel's graph, or of its program if it is compiled, with buffers."""
    # `kernel.call` checks for open loops, and would reject a compiled kernel for its loops.
    call = UOp(Ops.SINK).call(*buffers)
    return call.replace(src=(_programs.get(kernel, kernel), *call.src[1:]))


def compile_calls(linear: UOp) -> UOp:
    """A LINEAR of calls with programs in place of graphs."""
    compile_all([linear])
    calls = ((call, call.src[0]) for call in linear.src)
    return linear.replace(src=tuple(c.replace(src=(_programs.get(ast, ast), *c.src[1:])) for c, ast in calls))


def compile_all(linears: Sequence[UOp]) -> None:
    """Compiles the kernels of several LINEARs at once, so that tinygrad's compiler processes share the work. Raises
    PreemptedError (`interruptible`)."""
    if not _interrupted:
        _compile(_uncompiled(linears))
        return
    for done, _ in compile_in_turns(linears):
        if done and _interrupted():
            raise PreemptedError("Compiling stopped because a request came in.")


def compile_in_turns(linears: Sequence[UOp]) -> Iterator[tuple[int, int]]:
    """Compiles the kernels of several LINEARs, one for each of tinygrad's compiler processes in a turn. Before each it
    yields how many of these kernels it has compiled, and how many there are to compile."""
    todo, at_once = _uncompiled(linears), max(1, int(os.environ.get("PARALLEL", "0")))
    for start in range(0, len(todo), at_once):
        yield start, len(todo)
        _compile(todo[start : start + at_once])


def _uncompiled(linears: Sequence[UOp]) -> list[UOp]:
    """A call of each kernel that is not compiled. The largest come first, or all processes would wait for the last of
    them."""
    calls = {call.src[0]: call for linear in linears for call in linear.src if call.src[0] not in _programs}
    graphs = [graph for graph in calls if graph.op is Ops.SINK]
    graphs.sort(key=lambda graph: len(graph.toposort()), reverse=True)
    return [calls[graph] for graph in graphs]


def _compile(calls: Sequence[UOp]) -> None:
    if not calls:
        return
    compiled = realize.compile_linear(UOp(Ops.LINEAR, src=tuple(calls)))
    for call, done in zip(calls, compiled.src, strict=True):
        _programs[call.src[0]] = done.src[0]
        if key := _cache_keys.pop(call.src[0], ""):
            disk_cache().put("kernels", key, to_program_key(call.src[0], Device[Device.DEFAULT].renderer))


def compile_once(description: tuple[object, ...], build: Callable[[], Sequence[UOp]]) -> None:
    """Compiles the kernels of the LINEARs that `build` returns, unless an earlier run did so for the same `description`
    (see `fingerprint`) and source: then they are found on disk when they are used."""
    if not was_compiled(description):
        compile_all(build())
        if key := _compiled_key(description):
            disk_cache().put("compiled", key, True)


def was_compiled(description: tuple[object, ...]) -> bool:
    """Whether this run or an earlier one called `compile_once` with it."""
    key = _compiled_key(description)
    return bool(key and disk_cache().get("compiled", key))


def _compiled_key(description: tuple[object, ...]) -> str:
    """ "" if the description has no fingerprint."""
    try:
        target = str(Device[Device.DEFAULT].renderer.target)
        sources = source_digest("kernels", "formats", "description", "runtime", "targets")
        return repr((sources, target, fingerprint(description)))
    except TypeError:
        return ""


def program_or_graph(description: tuple[object, ...], build: Callable[[], UOp]) -> UOp:
    """The cached program of the kernel with this `description` (see `fingerprint`); without one the graph that `build`
    returns, to be compiled."""
    try:
        target = str(Device[Device.DEFAULT].renderer.target)
        cache_key = repr((source_digest(), target, fingerprint(description)))
    except TypeError:
        cache_key = ""
    if cache_key and (program_key := disk_cache().get("kernels", cache_key)):
        program = realize.to_program_cache.get(program_key)
        if program is not None:
            return program
    graph = build()
    if cache_key:
        _cache_keys[graph] = cache_key
    return graph


def fingerprint(value: object) -> str:
    """A text that identifies a value, and for a function all that its result depends on beside its arguments: where it
    is defined, and the values that it captured from an outer function. Raises TypeError for other types of values."""
    if value is None or isinstance(value, bool | int | float | str | bytes | DType):
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(fingerprint, value))})"
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        captured = (f"{name}={fingerprint(cell.cell_contents)}" for name, cell in cells)
        if value.__defaults__ or value.__kwdefaults__:
            raise TypeError("a function with default arguments has no fingerprint")
        return f"{value.__module__}.{value.__qualname__}({', '.join(captured)})"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{field.name}={fingerprint(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(parts)})"
    raise TypeError(f"a {type(value).__name__} has no fingerprint")
