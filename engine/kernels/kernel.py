"""A kernel: the function that builds its graph, its buffers by name, and what it says of its launch.

The names are those of the function's parameters, so call sites and kernels cannot mean different buffers, and a buffer
that is added to a kernel moves no other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tinygrad import UOp

from engine.kernels.launch_hints import NO_HINTS, LaunchHints, with_hints

T = TypeVar("T")

Run = tuple[str, int]
"""The name of several buffers that one owner makes and reads, as the planes of a matrix or of a cache, and how many."""

Name = str | Run | Literal[False]
"""The name of a buffer or of a run of them, or False: a kernel without it, as in `bias and "bias"`."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """`function` takes a placeholder for each buffer, as the parameter of its name: a list for a `Run`, None for a
    parameter that the kernel has no buffer for. It returns the kernel's graph (`finish` in the kernels' `uops`).
    `outputs` are the buffers that the kernel writes, and may read; `inputs` those that it only reads. Raises ValueError
    if a name is there twice, or if the hints name other buffers."""

    function: Callable[..., UOp]
    outputs: tuple[Name, ...]
    inputs: tuple[Name, ...]
    hints: LaunchHints = NO_HINTS

    def __post_init__(self) -> None:
        names = [name for name, _ in self._counts]
        if len({*names}) < len(names) or not {*self.hints.waits_for} <= {*names}:
            raise ValueError(f"{self.name} has buffers {names}, and waits for {self.hints.waits_for}")

    @property
    def name(self) -> str:
        """For messages: where the kernel is made."""
        return f"{self.function.__module__}.{self.function.__qualname__.split('.')[0]}"

    @functools.cached_property
    def _counts(self) -> list[tuple[str, int | None]]:
        """The names in the order of the buffers' slots, each with the number of a run's buffers."""
        named = [name for name in (*self.outputs, *self.inputs) if name]
        return [(name, None) if isinstance(name, str) else name for name in named]

    @functools.cached_property
    def buffers(self) -> tuple[str, ...]:
        """The name of each buffer, by its slot. Those of a run are numbered: "planes.0"."""
        names: list[str] = []
        for name, count in self._counts:
            names += [name] if count is None else [f"{name}.{i}" for i in range(count)]
        return tuple(names)

    def by_slot(self, buffers: Mapping[str, T | Sequence[T] | None]) -> list[T]:
        """The `buffers`, which are given by name, in the order of their slots; None is no buffer. Raises ValueError if
        one of the kernel's is missing, or one is given that it does not have."""
        result: list[T] = []
        given: dict[str, Any] = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        for name, count in self._counts:
            buffer = given.pop(name, () if count == 0 else None)
            run = [*buffer] if isinstance(buffer, list | tuple) else [buffer]
            if buffer is None or len(run) != (1 if count is None else count):
                wanted, got = (
                    "a buffer" if count is None else f"{count} buffers",
                    0 if buffer is None else len(run),
                )
                raise ValueError(f"{self.name} wants {wanted} as {name}, not {got}")
            result += run
        unknown = [name for name, buffer in given.items() if not isinstance(buffer, list | tuple) or buffer]
        if unknown:
            raise ValueError(f"{self.name} has no buffer {', '.join(unknown)}")
        return result

    def graph(self, *placeholders: UOp) -> UOp:
        """The kernel's graph for buffers like the `placeholders`, which are in the order of their slots."""
        left = iter(placeholders)
        buffers: dict[str, UOp | list[UOp]] = {}
        for name, count in self._counts:
            buffers[name] = next(left) if count is None else [next(left) for _ in range(count)]
        return with_hints(call_by_name(self.function, buffers), self.buffers, self.hints)


def call_by_name(function: Callable[..., T], buffers: Mapping[str, object], *arguments: object) -> T:
    """`function` of `arguments`, and of `buffers` as the parameters of their names. A parameter without one is None."""
    parameters = [*inspect.signature(function).parameters.values()][len(arguments) :]
    names = (p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)
    return function(*arguments, **{**dict.fromkeys(names), **buffers})
