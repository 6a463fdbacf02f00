"""Compiles kernels, several at once, and reuses the programs that earlier runs left in the disk cache.

Building a kernel's graph, and computing the digest by which tinygrad identifies its program, takes Python longer than
everything else in the start of a model whose programs are cached. So a program is also identified by what its graph
follows from: the function that builds it, the function's arguments, and the source. Then its graph is not built again.

A kernel that is not known is built and compiled in a compiler process, which gets that function (`compile_once`). Until
its program is there, a node stands in for its graph. So this process hardly works for a kernel, and goes on with what
else is to be done, the answers of conversations too (`interruptible`). What a process does not send is made here.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from tinygrad import UOp
from tinygrad.codegen import to_program_context, to_program_key
from tinygrad.engine import realize
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops

from engine.cache.disk_cache import disk_cache
from engine.cache.sources import STEP_SOURCES, source_digest
from engine.errors import CompilerHangsError, PreemptedError, print_without_messages
from engine.kernels import compilers
from engine.kernels.functions import fingerprint, packed
from engine.kernels.target import renderer, told

T = TypeVar("T")
KernelFunction = Callable[..., UOp]
"""A function that takes placeholders of buffers and returns a kernel's graph: a kernel of a CPU."""

MakeLinears = Callable[[], Sequence[UOp]]
"""Builds LINEARs of kernels' calls."""

Compiled = tuple[tuple[object, ...], UOp]
"""A program, and before it the key by which tinygrad knows it."""

_programs: WeakKeyDictionary[UOp, UOp] = WeakKeyDictionary()  # of the graphs that this process has compiled
_cache_keys: dict[UOp, str] = {}  # graphs to compile, and the keys of their programs in the disk cache


class _Unbuilt(NamedTuple):
    """What makes a graph: a function of a module, and its arguments. `size`: that of its buffers."""

    build: Callable[..., UOp]
    arguments: tuple[object, ...]
    size: int = 0


_unbuilt: dict[UOp, _Unbuilt] = {}  # by the nodes that stand in for the graphs


class _Compiling(NamedTuple):
    """A kernel that a compiler process is at work on. `bar` is told when it is done, as tinygrad's own progress bar."""

    task: compilers.Task[list[Compiled]]
    bar: Any


_PATIENCE_S = 120.0  # a process that was killed never answers
_POLL_S = 0.005
_compiling: dict[UOp, _Compiling] = {}  # by their graphs
_failed: set[UOp] = set()  # what is to be made here, as a compiler process did not
_heard_s = 0.0  # when a process was given the first kernel, or sent one
_begins = False  # in `left_to_compilers`
_built: dict[str, list[Sequence[UOp]]] = {}  # what `compile_once` has built by now, by its description
_interrupted: Callable[[], bool] | None = None
_waits = True


@contextmanager
def interruptible(interrupted: Callable[[], bool], waits: bool = True) -> Iterator[None]:
    """Meanwhile, `compile_once` and `compile_all` raise PreemptedError soon after `interrupted`. Calling them again
    goes on: what was made by then is kept, and the processes go on. Without `waits` that is also raised as soon as
    there is nothing to do but to wait for them, and they take half of the CPUs."""
    global _interrupted, _waits
    _interrupted, _waits = interrupted, waits
    try:
        yield
    finally:
        _interrupted, _waits = None, True


def _give_way() -> None:
    if _interrupted and _interrupted():
        raise PreemptedError("Compiling stopped because there is something else to do.")


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
    """Compiles the kernels of several LINEARs at once, so that compiler processes share the work. Raises PreemptedError
    (`interruptible`)."""
    if not _interrupted:
        _compile(_uncompiled(linears))
        return
    for _ in compile_in_turns(linears):
        _give_way()


def compile_in_turns(linears: Sequence[UOp]) -> Iterator[tuple[int, int]]:
    """Compiles the kernels of several LINEARs. Often, and while it waits for the compiler processes, it yields how many
    of these kernels it has compiled, and how many there are to compile."""
    total = len(todo := _uncompiled(linears))
    while todo:
        yield total - len(todo), total
        _compile_some(todo)
        todo = _uncompiled(linears)


def _compile_some(calls: Sequence[UOp]) -> None:
    """Gives kernels to the compiler processes, up to one for each, and takes what they have compiled; or compiles one
    here if there are no such processes. Waits for a moment if there is nothing else to do."""
    at_once = max(1, int(os.environ.get("PARALLEL", "0")) // (1 if _waits else 2))
    is_at_work = _take_compiled()
    for call in calls:
        graph = call.src[0]
        if len(_compiling) >= at_once:
            break
        if graph in _compiling or graph in _programs:
            continue
        is_at_work = True
        if not _send(graph):
            _compile_here(call)
            break
        _give_way()
    if is_at_work or not _compiling:
        return
    if not _waits:
        raise PreemptedError("Compiler processes are at work.")
    wait_for_compilers()


def _send(graph: UOp) -> bool:
    """Gives a graph to a compiler process; False if it is compiled, or if there are no such processes."""
    global _heard_s
    if graph in _compiling or graph in _failed:
        return graph in _compiling
    unbuilt = _unbuilt.get(graph)
    if not unbuilt and to_program_key(graph, renderer()) in realize.to_program_cache:
        return False
    if not (pool := compilers.pool()):
        return False
    if not _compiling:
        _heard_s = time.monotonic()
    made = packed(unbuilt) if unbuilt else pickle.dumps(_Unbuilt(_same, (graph,)))
    bar = realize.tqdm(total=1, desc="compiling", disable=True)
    _compiling[graph] = _Compiling(compilers.Task(pool, _compile_unbuilt, *_for_compiler(), made), bar)
    return True


def _same(graph: UOp) -> UOp:
    return graph


def _take_compiled() -> bool:
    """Takes what compiler processes have compiled. What those that were ended (`compilers.end`) had begun is to be
    given again, but what they were long silent about is to be made here. Whether there was something to take."""
    was_there = False
    for graph, (task, _) in [*_compiling.items()]:
        if task.is_lost:
            del _compiling[graph]
        elif task.is_done():
            was_there = True
            _take(graph)
            _give_way()
    if _compiling and time.monotonic() - _heard_s > _PATIENCE_S:
        _failed.update(_compiling)
        compilers.end()
    return was_there


def _take(graph: UOp) -> None:
    """Takes a kernel that is compiled. If that failed, it is to be made here, which then raises why. Raises
    CompilerHangsError."""
    global _heard_s
    _heard_s = time.monotonic()
    task, bar = _compiling.pop(graph)
    try:
        [(key, program)] = task.result()
    except CompilerHangsError:
        raise
    except Exception as error:
        print_without_messages(error)
        _failed.add(graph)
        return
    if graph not in _programs:
        realize.to_program_cache[key] = program
        if program.arg.local_size is not None:
            _keep(graph, program, key)
        else:  # tinygrad has to find one, on the device
            _failed.add(graph)
    bar.update(1)


def _keep(graph: UOp, program: UOp, key: tuple[object, ...]) -> None:
    _programs[graph] = program
    _unbuilt.pop(graph, None)
    _failed.discard(graph)
    if cache_key := _cache_keys.pop(graph, ""):
        disk_cache().put("kernels", cache_key, key)


def _uncompiled(linears: Sequence[UOp]) -> list[UOp]:
    """A call of each kernel that is not compiled. The largest come first, or all processes would wait for the last of
    them."""
    calls = {call.src[0]: call for linear in linears for call in linear.src if call.src[0] not in _programs}
    graphs = [graph for graph in calls if graph.op is Ops.SINK]
    graphs.sort(key=_work, reverse=True)
    return [calls[graph] for graph in graphs]


def _work(graph: UOp) -> int:
    """What it may take to compile a kernel, in comparison. Of those that are not built, the largest buffers are those
    of the head and of attention, whose kernels are among the longest."""
    if graph in _compiling:
        return 0
    return unbuilt.size if (unbuilt := _unbuilt.get(graph)) else len(graph.toposort())


def _compile(calls: Sequence[UOp]) -> None:
    """Compiles kernels, and waits for that."""
    if len(calls) > 1:
        for call in calls:
            _send(call.src[0])
    for call in calls:
        while call.src[0] in _compiling:
            _compiling[call.src[0]].task.wait(1.0)
            _take_compiled()
        if call.src[0] not in _programs:
            _compile_here(call)


def _compile_here(call: UOp) -> None:
    graph = call.src[0]
    built = unbuilt.build(*unbuilt.arguments) if (unbuilt := _unbuilt.get(graph)) else graph
    linear = realize.compile_linear(UOp(Ops.LINEAR, src=(call.replace(src=(built, *call.src[1:])),)))
    _keep(graph, linear.src[0].src[0], to_program_key(built, renderer()))


def processes_compile() -> bool:
    """Whether compiler processes are at work, so that this one has time until they are done."""
    return bool(_compiling)


def compile_once(description: tuple[object, ...], *makes: MakeLinears) -> None:
    """Compiles the kernels of the LINEARs that `makes` build, unless an earlier run did so for the same `description`
    (see `fingerprint`) and source: then they are found on disk when they are used. Raises PreemptedError
    (`interruptible`)."""
    begin_once(description, *makes)()


def begin_once(description: tuple[object, ...], *makes: MakeLinears) -> Callable[[], None]:
    """Does the first part of `compile_once`: builds the LINEARs. The function that it returns waits for the compiler
    processes, and compiles what they do not."""
    key = _compiled_key(description)
    if key and disk_cache().get("compiled", key):
        return lambda: None
    built = _built.setdefault(key, []) if key else []
    with left_to_compilers():
        for make in makes[len(built) :]:
            built.append(made := make())
            if not _interrupted:  # else it is not all to be compiled at once
                begin_compiling(made)
            _give_way()

    def finish() -> None:
        compile_all([linear for linears in built for linear in linears])
        if key:
            del _built[key]
            disk_cache().put("compiled", key, True)

    return finish


@contextmanager
def left_to_compilers() -> Iterator[None]:
    """Meanwhile, compiler processes are left to build the graphs of kernels that are not compiled, if there are such
    processes."""
    global _begins
    _begins = True
    try:
        yield
    finally:
        _begins = False


def begin_compiling(linears: Sequence[UOp]) -> None:
    """Gives the kernels of several LINEARs to the compiler processes, and does not wait for them (`compile_all`)."""
    for call in _uncompiled(linears):
        _send(call.src[0])


def processes_are_done(linear: UOp) -> bool:
    """Whether compiler processes are at work on no kernel of a LINEAR any more: it is compiled, or failed there."""
    _take_compiled()
    return not any(call.src[0] in _compiling for call in linear.src)


def wait_for_compilers() -> None:
    """Waits for a moment, if compiler processes are at work. Raises PreemptedError (`interruptible`)."""
    _give_way()
    if _compiling:
        next(iter(_compiling.values())).task.wait(_POLL_S)


def was_compiled(description: tuple[object, ...]) -> bool:
    """Whether this run or an earlier one called `compile_once` with it."""
    key = _compiled_key(description)
    return bool(key and disk_cache().get("compiled", key))


def _compiled_key(description: tuple[object, ...]) -> str:
    """ "" if the description has no fingerprint."""
    try:
        target = str(renderer().target)
        sources = source_digest(*STEP_SOURCES)
        return repr((sources, target, fingerprint(description)))
    except TypeError:
        return ""


def program_or_graph(
    description: tuple[object, ...], build: Callable[..., UOp], *arguments: object, size: int = 0
) -> UOp:
    """The cached program of the kernel with this `description` (see `fingerprint`); without one the graph that `build`
    returns, or in `compile_once` what stands in for it, to be compiled. Only what has arguments, and is a function of a
    module, is built by compiler processes. `size`: that of its buffers."""
    cache_key = _program_key(description)
    if cache_key and (program_key := disk_cache().get("kernels", cache_key)):
        program = realize.to_program_cache.get(program_key)
        if program is not None:
            return program
    if _begins and cache_key and arguments and compilers.are_wanted():
        graph = UOp(Ops.SINK, arg=cache_key)
        _unbuilt[graph] = _Unbuilt(build, arguments, size)
    else:
        graph = build(*arguments)
    if cache_key:
        _cache_keys[graph] = cache_key
    return graph


def _program_key(description: tuple[object, ...]) -> str:
    """ "" if the description has no fingerprint."""
    try:
        target = str(renderer().target)
        return repr((source_digest(), target, fingerprint(description)))
    except TypeError:
        return ""


def in_compiler(function: Callable[..., T], *arguments: object) -> Callable[[], T] | None:
    """Has a compiler process call a function of a module with these arguments, and with a function that makes programs
    of graphs (`keep_program`). It may use no device. What is returned waits for the result; None if there are no such
    processes."""
    if (pool := compilers.pool()) is None:
        return None
    compile_graphs = partial(_compile_graphs, *_for_compiler())
    task = compilers.Task(pool, function, *arguments, compile_graphs)
    return lambda: task.result() if task.wait(_PATIENCE_S) else function(*arguments, compile_graphs)


def keep_program(description: tuple[object, ...], key: tuple[object, ...], program: UOp) -> UOp:
    """A program that a compiler process made (`in_compiler`), which `program_or_graph` finds from now on."""
    realize.to_program_cache[key] = program
    if cache_key := _program_key(description):
        disk_cache().put("kernels", cache_key, key)
    return program


CompileKernel = Callable[[tuple[int, tuple[UOp, Renderer], dict[str, int]]], tuple[int, UOp]]


def _compile_unbuilt(
    compile_kernel: CompileKernel, target: Renderer, context: dict[str, int], made: bytes
) -> list[Compiled]:
    """Runs in a compiler process."""
    with told(target):
        build, arguments, _ = pickle.loads(made)
        return _compile_graphs(compile_kernel, target, context, [build(*arguments)])


def _compile_graphs(
    compile_kernel: CompileKernel, target: Renderer, context: dict[str, int], graphs: Sequence[UOp]
) -> list[Compiled]:
    keys = [to_program_key(graph, target) for graph in graphs]
    tasks = (compile_kernel((0, (graph, target), context)) for graph in graphs)
    return [(key, program) for key, (_, program) in zip(keys, tasks, strict=True)]


def _for_compiler() -> tuple[CompileKernel, Renderer, dict[str, int]]:
    """What a compiler process has to know beside a graph."""
    context = {variable.key: variable.value for variable in to_program_context}
    return realize._compile_kernel, renderer(), context
