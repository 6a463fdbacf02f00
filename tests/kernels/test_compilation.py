"""Fingerprints, by which programs are found in the disk cache, and compiling that gives way."""

import errno
import pickle
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import pytest
from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.errors import PreemptedError
from engine.kernels import compilation, compilers
from engine.kernels.compilation import (
    begin_compiling,
    compile_all,
    compile_in_turns,
    compile_once,
    interruptible,
    processes_are_done,
    wait_for_compilers,
)
from engine.kernels.functions import fingerprint, packed


@dataclass(frozen=True)
class Shape:
    rows: int
    cols: tuple[int, ...]


class Kind(Enum):
    PLAIN = "plain"
    PACKED = "packed"


def factory(shape, name=None):
    inner = lambda x: x + shape.rows

    def kernel(a):
        return inner(a), name

    return kernel


def test_functions_of_other_arguments_have_other_fingerprints():
    known = fingerprint(factory(Shape(3, (4,)), "t"))
    assert known == fingerprint(factory(Shape(3, (4,)), "t"))
    others = [factory(Shape(3, (5,)), "t"), factory(Shape(2, (4,)), "t"), factory(Shape(3, (4,)), "u")]
    others += [factory(Shape(3, (4,)), kind) for kind in Kind]
    assert len({known, *map(fingerprint, others)}) == 6


@pytest.mark.parametrize("value", [object(), {1: 2}, Shape, lambda x=1: x])
def test_other_values_have_no_fingerprint(value):
    with pytest.raises(TypeError):
        fingerprint((value,))


@dataclass(frozen=True)
class Info:
    """What is said of a program."""

    name: str
    local_size: tuple[int, ...] | None = (1,)


class Pool:
    """Compiler processes that answer when they are told to."""

    def __init__(self):
        self.given, self.answers, self.local_size = [], [], (1,)

    def apply_async(self, function, arguments):
        _, (*_, made) = pickle.loads(arguments[0])
        build, of, _ = pickle.loads(made)
        graph = build(*of)
        self.given.append(graph.arg)
        answer = SimpleNamespace(is_ready=False, waited=0)
        answer.ready = lambda: answer.is_ready
        answer.get = lambda: pickle.dumps([(graph.arg, UOp(Ops.NOOP, arg=Info(graph.arg, self.local_size)))])
        answer.wait = lambda seconds: setattr(answer, "waited", answer.waited + 1)
        self.answers.append(answer)
        return answer

    def answer(self, *names):
        for name in names:
            self.answers[self.given.index(name)].is_ready = True

    def terminate(self):
        pass


@pytest.fixture
def pool(monkeypatch):
    pool, compiled = Pool(), []
    monkeypatch.setattr(compilers.worker, "worker_pool", pool)
    monkeypatch.setattr(compilers.worker, "get_worker_pool", lambda: compilers.worker.worker_pool)
    monkeypatch.setattr(compilation, "to_program_key", lambda graph, renderer: graph.arg)
    monkeypatch.setattr(compilation.realize, "to_program_cache", {})
    for name in ("_programs", "_compiling", "_built", "_unbuilt", "_cache_keys"):
        monkeypatch.setattr(compilation, name, {})
    monkeypatch.setattr(compilation, "_failed", set())
    get = lambda table, key: key in compiled
    monkeypatch.setattr(compilation, "_compiled_key", repr)
    put = lambda table, key, value: compiled.append(key)
    monkeypatch.setattr(compilation, "disk_cache", lambda: SimpleNamespace(put=put, get=get))

    def compile_linear(linear):
        programs = compilation.realize.to_program_cache
        done = lambda name: programs.get(name, UOp(Ops.NOOP, arg=Info(f"{name} made here")))
        return linear.replace(src=tuple(c.replace(src=(done(c.src[0].arg),)) for c in linear.src))

    monkeypatch.setattr(compilation.realize, "compile_linear", compile_linear)
    monkeypatch.setenv("PARALLEL", "4")
    return pool


def linear_of(*names):
    return [UOp(Ops.LINEAR, src=tuple(UOp(Ops.SINK, arg=name).call() for name in names))]


def programs():
    return {graph.arg: program.arg.name for graph, program in compilation._programs.items()}


def test_compiling_gives_way_to_a_request_and_goes_on(pool):
    linears, asked = linear_of(*"abcde"), iter([False, False, True])
    with interruptible(lambda: next(asked)), pytest.raises(PreemptedError):
        compile_all(linears)
    assert pool.given == ["a", "b"] and not programs(), "it was asked before the first, and after each"
    pool.answer("a", "b")
    turns = compile_in_turns(linears)
    assert [next(turns) for _ in range(2)] == [(0, 5), (2, 5)]
    assert pool.given == [*"abcde"] and programs() == {"a": "a", "b": "b"}
    assert next(turns) == (2, 5) and pool.answers[2].waited == 1, "a moment, and the caller may go on"
    pool.answer(*"cde")
    assert [*turns] == [] and len(programs()) == 5


def test_what_is_begun_is_compiled_while_this_process_does_something_else(pool, monkeypatch):
    [first], [second] = linear_of("a", "b"), linear_of("b", "c")
    begin_compiling([first])
    begin_compiling([second])
    assert pool.given == [*"abc"]
    pool.answer("b", "c")
    assert processes_are_done(second) and not processes_are_done(first) and programs() == {"b": "b", "c": "c"}
    wait_for_compilers()
    assert pool.answers[0].waited == 1
    monkeypatch.setattr(compilation, "_PATIENCE_S", -1.0)
    assert not processes_are_done(first), "silent processes are ended"
    assert processes_are_done(first) and "a" not in programs(), "it is to be made here"


def test_beside_answers_nothing_waits_for_processes_and_what_is_built_is_kept(pool):
    built = []

    def make(*names):
        return lambda: built.append(names) or linear_of(*names)

    def go_on(is_over=lambda: False):
        with interruptible(is_over, waits=False):
            compile_once(("step",), make("a", "b", "c"), make("d"))

    with pytest.raises(PreemptedError):
        go_on(lambda: True)
    assert built == [("a", "b", "c")] and not pool.given, "each slice does a part"
    for _ in range(2):
        with pytest.raises(PreemptedError):
            go_on()
        assert pool.given == ["a", "b"], "two of four CPUs"
    assert built == [("a", "b", "c"), ("d",)]
    pool.answer("b")
    with pytest.raises(PreemptedError):
        go_on()
    assert pool.given == ["a", "b", "c"] and programs() == {"b": "b"}
    pool.answer("a", "c")
    with pytest.raises(PreemptedError):
        go_on()
    pool.answer("d")
    go_on()
    assert len(built) == 2 and len(programs()) == 4 and not compilation._built
    assert not any(answer.waited for answer in pool.answers)


def test_without_a_place_for_locks_there_are_no_processes(monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compilers.worker, "get_worker_pool", full)
    monkeypatch.setattr(compilers.PARALLEL, "value", 2)
    monkeypatch.setattr(compilers.multiprocessing, "current_process", lambda: SimpleNamespace(daemon=False))
    assert compilers.are_wanted()
    assert compilers.pool() is None and not compilers.are_wanted()


def test_what_ended_processes_had_begun_is_given_again(pool, monkeypatch):
    linears = linear_of("a", "b")
    with interruptible(lambda: False, waits=False), pytest.raises(PreemptedError):
        compile_all(linears)
    compilers.end()
    monkeypatch.setattr(compilers.worker, "worker_pool", other := Pool())
    with interruptible(lambda: False, waits=False), pytest.raises(PreemptedError):
        compile_all(linears)
    assert pool.given == other.given == ["a", "b"]
    other.answer("a", "b")
    compile_all(linears)
    assert programs() == {"a": "a", "b": "b"}


@pytest.mark.parametrize("waits", [True, False])
def test_what_processes_do_not_send_is_made_here(pool, monkeypatch, waits):
    monkeypatch.setattr(compilation, "_PATIENCE_S", -1.0)
    linears = linear_of("a", "b")
    if waits:
        compile_all(linears)  # they were killed
    else:
        assert len([*compile_in_turns(linears)]) < 9
    assert programs() == {"a": "a made here", "b": "b made here"} and not compilation._failed


def test_what_has_no_size_of_blocks_yet_is_finished_here(pool):
    pool.local_size = None
    turns = compile_in_turns(linear_of("a", "b"))
    next(turns), next(turns), pool.answer("a", "b")
    assert len([*turns]) < 9 and programs() == {"a": "a", "b": "b"}


def test_functions_travel_with_what_they_captured():
    function = pickle.loads(packed(factory(Shape(3, (4,)), Kind.PACKED)))
    assert fingerprint(function) == fingerprint(factory(Shape(3, (4,)), Kind.PACKED))
    assert function(4) == (7, Kind.PACKED)
