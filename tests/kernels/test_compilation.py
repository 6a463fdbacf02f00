"""Fingerprints, by which programs are found in the disk cache, and compiling that gives way."""

import pickle
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from types import SimpleNamespace

import pytest
from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.errors import PreemptedError
from engine.kernels import compilation
from engine.kernels.compilation import (
    compile_all,
    compile_in_turns,
    fingerprint,
    interruptible,
)


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


def test_compiling_gives_way_to_a_request_and_goes_on(monkeypatch):
    graphs = [UOp(Ops.SINK, arg=f"kernel {n}") for n in range(5)]
    linear = UOp(Ops.LINEAR, src=tuple(graph.call() for graph in graphs))
    batches = []
    monkeypatch.setattr(
        compilation, "_compile", lambda calls: batches.append([c.src[0] for c in calls]) or keep(calls)
    )
    keep = lambda calls: compilation._programs.update({call.src[0]: call.src[0] for call in calls})
    monkeypatch.setattr(compilation, "_programs", {})
    monkeypatch.setenv("PARALLEL", "2")
    asked = iter([False, True])
    with interruptible(lambda: next(asked)), pytest.raises(PreemptedError):
        compile_all([linear])
    assert [len(batch) for batch in batches] == [2, 2]
    compile_all([linear])
    assert sorted(chain(*batches), key=graphs.index) == graphs
    compilation._programs.clear()
    assert list(compile_in_turns([linear])) == [(0, 5), (2, 5), (4, 5)], "a kernel for each process in a turn"


@dataclass(frozen=True)
class Info:
    """What is said of a program."""

    name: str
    local_size: tuple[int, ...] = (1,)


class Pool:
    """Compiler processes that answer when they are told to."""

    def __init__(self):
        self.given = []

    def apply_async(self, function, arguments):
        _, (_, (graph, _), _) = arguments
        self.given.append(graph)
        answer = SimpleNamespace(is_ready=False, wait=lambda seconds: setattr(answer, "is_ready", True))
        answer.ready, answer.get, answer.graph = (
            lambda: answer.is_ready,
            lambda: pickle.dumps((0, UOp(Ops.NOOP, arg=Info(graph.arg)))),
            graph,
        )
        self.answers = [*getattr(self, "answers", []), answer]
        return answer


@pytest.fixture
def pool(monkeypatch):
    pool, compiled = Pool(), []
    monkeypatch.setattr(compilation.worker, "worker_pool", pool)
    monkeypatch.setattr(compilation.worker, "get_worker_pool", lambda: compilation.worker.worker_pool)
    monkeypatch.setattr(compilation, "to_program_key", lambda graph, renderer: graph.arg)
    monkeypatch.setattr(compilation.realize, "to_program_cache", {})
    monkeypatch.setattr(compilation, "_programs", {})
    monkeypatch.setattr(compilation, "_compiling", {})
    monkeypatch.setattr(compilation, "_built", {})
    get = lambda table, key: key in compiled
    monkeypatch.setattr(compilation, "_compiled_key", repr)
    put = lambda table, key, value: compiled.append(key)
    monkeypatch.setattr(compilation, "disk_cache", lambda: SimpleNamespace(put=put, get=get))

    def compile_linear(linear):
        programs = compilation.realize.to_program_cache
        done = lambda name: programs.get(name, UOp(Ops.NOOP, arg=Info(name)))
        return linear.replace(src=tuple(c.replace(src=(done(c.src[0].arg),)) for c in linear.src))

    monkeypatch.setattr(compilation.realize, "compile_linear", compile_linear)
    monkeypatch.setenv("PARALLEL", "4")
    return pool


def linear_of(*names):
    return [UOp(Ops.LINEAR, src=tuple(UOp(Ops.SINK, arg=name).call() for name in names))]


def test_what_processes_have_compiled_is_taken_and_what_ended_ones_had_begun_is_compiled_here(
    pool, monkeypatch
):
    [linear] = linear_of("a", "b")
    graphs = [call.src[0] for call in linear.src]
    assert all(map(compilation._send, graphs)) and pool.given == graphs
    pool.answers[0].is_ready = True
    monkeypatch.setattr(compilation.worker, "worker_pool", Pool())  # the first was dismissed
    compile_all([linear])
    assert [compilation._programs[graph].arg.name for graph in graphs] == ["a", "b"]
    assert not compilation._compiling and not pool.answers[1].is_ready, "nobody waited for it"
