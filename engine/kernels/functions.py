"""Functions with what they captured, as values: a text that identifies one, and bytes from which another process makes
it.

A kernel's graph follows from such a function. tinygrad identifies a program by its graph, which takes long to build.
"""

from __future__ import annotations

import io
import marshal
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from types import CellType, FunctionType
from typing import Any

from tinygrad.dtype import DType


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


def described(value: object) -> object:
    """What stands for a value in several descriptions: its fingerprint, so that it is not made for each of them, which
    takes a hundredth of a second for a model; the value itself if it has none."""
    try:
        return fingerprint(value)
    except TypeError:
        return value


def packed(value: object) -> bytes:
    """A value that has a fingerprint, for `pickle.loads` in a process of the same Python and source. What pickle cannot
    take are functions in functions: they travel as their code and what they captured."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, FunctionType) or "<" not in value.__qualname__:
            return NotImplemented
        captured = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return _function, (value.__module__, value.__qualname__, marshal.dumps(value.__code__), captured)


def _function(module: str, name: str, code: bytes, captured: tuple[object, ...]) -> Callable[..., object]:
    cells = tuple(map(CellType, captured))
    function = FunctionType(marshal.loads(code), import_module(module).__dict__, name, None, cells)
    function.__qualname__ = name
    return function
