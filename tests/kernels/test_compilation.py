"""Fingerprints, by which programs are found in the disk cache."""

from dataclasses import dataclass
from enum import Enum

import pytest

from engine.kernels.compilation import fingerprint


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
