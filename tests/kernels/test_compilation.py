"""Fingerprints, by which programs are found in the disk cache, and compiling that gives way."""

from dataclasses import dataclass
from enum import Enum
from itertools import chain

import pytest
from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.errors import PreemptedError
from engine.kernels import compilation
from engine.kernels.compilation import compile_all, compile_in_turns, fingerprint, interruptible


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
