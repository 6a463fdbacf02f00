"""Compiles kernels, several at once, and reuses the programs that earlier runs left in the disk cache.

Building a kernel's graph, and computing the digest by which tinygrad identifies its program, takes Python longer than
everything else in the start of a model whose programs are cached. So a program is also identified by what its graph
follows from: the function that builds it, the function's arguments, and the source. Then its graph is not built again.

Compiler processes get a graph as soon as it is built, and work while this process builds the next ones.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from multiprocessing.pool import AsyncResult, Pool
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from tinygrad import Device, UOp
from tinygrad.codegen import to_program_context, to_program_key
from tinygrad.dtype import DType
from tinygrad.engine import realize, worker
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops

from engine.disk_cache import disk_cache, source_digest
from engine.errors import PreemptedError

T = TypeVar("T")
KernelFunction = Callable[..., UOp]
"""A function that takes placeholders of buffers and returns a kernel's graph: a kernel of a CPU."""

MakeLinears = Callable[[], Sequence[UOp]]
"""Builds LINEARs of kernels' calls."""

Compiled = tuple[tuple[object, ...], UOp]
"""A program, and before it the key by which tinygrad knows it."""

_programs: WeakKeyDictionary[UOp, UOp] = WeakKeyDictionary()  # of the graphs that this process has compiled
_cache_keys: dict[UOp, str] = {}  # graphs to compile, and the keys of their programs in the disk cache
_interrupted: Callable[[], bool] | None = None


class _Compiling(NamedTuple):
    """A kernel that a compiler process is at work on. `bar` is told when it is done, as tinygrad's own progress bar."""

    key: tuple[object, ...]
    pool: Pool
    result: AsyncResult[bytes]
    bar: Any


_PATIENCE_S = 60.0
_compiling: dict[UOp, _Compiling] = {}  # by their graphs
_sends = False  # whether compiler processes get graphs as soon as they are built
_built: dict[str, list[Sequence[UOp]]] = {}  # what `compile_once` has built by now, by its description


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
    return call.replace(src=(compiled(kernel), *call.src[1:]))


def compiled(kernel: UOp) -> UOp:
    """The program of a kernel's graph if it is compiled, else the graph."""
    return _programs.get(kernel, kernel)


def compile_calls(linear: UOp) -> UOp:
    """A LINEAR of calls with programs in place of graphs."""
    compile_all([linear])
    return linear.replace(src=tuple(c.replace(src=(compiled(c.src[0]), *c.src[1:])) for c in linear.src))


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


def _send(graph: UOp) -> bool:
    """Gives a graph to a compiler process; False if it is compiled, or if there are no such processes."""
    renderer, context = _for_compiler()
    key = to_program_key(graph, renderer)
    if key in realize.to_program_cache or not (pool := worker.get_worker_pool()):
        return False
    if graph not in _compiling:
        result = _ask(pool, realize._compile_kernel, (0, (graph, renderer), context))
        bar = realize.tqdm(total=1, desc="compiling", disable=True)
        _compiling[graph] = _Compiling(key, pool, result, bar)
    return True


def _ask(pool: Pool, function: Callable[..., object], *arguments: object) -> AsyncResult[bytes]:
    """Has a compiler process call a function. The result comes as bytes: a thread of the pool receives it while this
    one makes nodes of graphs, and two threads may make one node twice."""
    return pool.apply_async(_pickled, (function, *arguments))


def _pickled(function: Callable[..., object], *arguments: object) -> bytes:
    return pickle.dumps(function(*arguments))


def _take_compiled() -> None:
    """Waits for all that compiler processes were given, and takes it. What those that were ended
    (`compiler_processes.dismiss`) had begun is left out."""
    for graph, (key, pool, result, bar) in [*_compiling.items()]:
        if pool is worker.worker_pool:
            result.wait(_PATIENCE_S)  # a process that was killed never answers
        del _compiling[graph]
        if result.ready() and graph not in _programs:
            _, program = pickle.loads(result.get())
            realize.to_program_cache[key] = program
            if program.arg.local_size is not None:  # else tinygrad has to find one
                _keep(graph, program, key)
            bar.update(1)


def _keep(graph: UOp, program: UOp, key: tuple[object, ...]) -> None:
    _programs[graph] = program
    if cache_key := _cache_keys.pop(graph, ""):
        disk_cache().put("kernels", cache_key, key)


def _uncompiled(linears: Sequence[UOp]) -> list[UOp]:
    """A call of each kernel that is not compiled. The largest come first, or all processes would wait for the last of
    them."""
    calls = {call.src[0]: call for linear in linears for call in linear.src if call.src[0] not in _programs}
    graphs = [graph for graph in calls if graph.op is Ops.SINK]
    graphs.sort(key=lambda graph: 0 if graph in _compiling else len(graph.toposort()), reverse=True)
    return [calls[graph] for graph in graphs]


def _compile(calls: Sequence[UOp]) -> None:
    if any(call.src[0] in _compiling for call in calls):
        _take_compiled()
        calls = [call for call in calls if call.src[0] not in _programs]
    if not calls:
        return
    programs = realize.compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src
    for call, done in zip(calls, programs, strict=True):
        _keep(call.src[0], done.src[0], to_program_key(call.src[0], Device[Device.DEFAULT].renderer))


def compile_once(description: tuple[object, ...], *makes: MakeLinears) -> None:
    """Compiles the kernels of the LINEARs that `makes` build, unless an earlier run did so for the same `description`
    (see `fingerprint`) and source: then they are found on disk when they are used. Raises PreemptedError
    (`interruptible`)."""
    begin_once(description, *makes)()


def begin_once(description: tuple[object, ...], *makes: MakeLinears) -> Callable[[], None]:
    """Does the first part of `compile_once`: builds the LINEARs. The function that it returns waits for the compiler
    processes, and compiles what they do not."""
    global _sends
    key = _compiled_key(description)
    if key and disk_cache().get("compiled", key):
        return lambda: None
    built = _built.setdefault(key, []) if key else []
    _sends = not _interrupted  # else it is not all to be compiled at once
    try:
        for make in makes[len(built) :]:
            built.append(make())
    finally:
        _sends = False

    def finish() -> None:
        compile_all([linear for linears in built for linear in linears])
        if key:
            del _built[key]
            disk_cache().put("compiled", key, True)

    return finish


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
    cache_key = _program_key(description)
    if cache_key and (program_key := disk_cache().get("kernels", cache_key)):
        program = realize.to_program_cache.get(program_key)
        if program is not None:
            return program
    graph = build()
    if cache_key:
        _cache_keys[graph] = cache_key
    if _sends and graph not in _programs:
        _send(graph)
    return graph


def _program_key(description: tuple[object, ...]) -> str:
    """ "" if the description has no fingerprint."""
    try:
        target = str(Device[Device.DEFAULT].renderer.target)
        return repr((source_digest(), target, fingerprint(description)))
    except TypeError:
        return ""


def in_compiler(function: Callable[..., T], *arguments: object) -> Callable[[], T] | None:
    """Has a compiler process call a function of a module with these arguments, and with a function that makes programs
    of graphs (`keep_program`). It may use no device. What is returned waits for the result; None if there are no such
    processes."""
    if (pool := worker.get_worker_pool()) is None:
        return None
    compile_graphs = partial(_compile_graphs, realize._compile_kernel, *_for_compiler())
    result = _ask(pool, function, *arguments, compile_graphs)

    def wait() -> T:
        result.wait(_PATIENCE_S)
        value: T = pickle.loads(result.get()) if result.ready() else function(*arguments, compile_graphs)
        return value

    return wait


def keep_program(description: tuple[object, ...], key: tuple[object, ...], program: UOp) -> UOp:
    """A program that a compiler process made (`in_compiler`), which `program_or_graph` finds from now on."""
    realize.to_program_cache[key] = program
    if cache_key := _program_key(description):
        disk_cache().put("kernels", cache_key, key)
    return program


def _compile_graphs(
    compile_kernel: Callable[..., tuple[int, UOp]],
    renderer: Renderer,
    context: dict[str, int],
    graphs: Sequence[UOp],
) -> list[Compiled]:
    keys = [to_program_key(graph, renderer) for graph in graphs]
    tasks = (compile_kernel((0, (graph, renderer), context)) for graph in graphs)
    return [(key, program) for key, (_, program) in zip(keys, tasks, strict=True)]


def _for_compiler() -> tuple[Renderer, dict[str, int]]:
    """What a compiler process has to know beside a graph."""
    return Device[Device.DEFAULT].renderer, {variable.key: variable.value for variable in to_program_context}


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
