"""tinygrad 0.14.0: programs and schedules made once are kept from one run to the next.

tinygrad works its way from tensors to code anew in every process, which takes seconds a model, in Python; its own
cache on disk holds only what the compiler makes of the source afterwards. Both of its tables that hold results of
this work are keyed by the content that they were made of. With this fix they are kept in `engine.disk_cache`
too, so that a model's second start compiles nothing.

Of a program's steps only what a launch and a profile need is kept: names, sizes, parameters, source, binary.
"""

from __future__ import annotations

from typing import Any

import tinygrad.codegen as codegen
import tinygrad.engine.realize as realize
import tinygrad.schedule as schedule
from tinygrad import Device
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops, UOp

from engine.disk_cache import Kept, store
from engine.fixes import require_tinygrad

_stock_compile_kernel = realize._compile_kernel
_CANDIDATE = "test"  # what tinygrad's search calls a kernel that it tries


def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError where another version is installed."""
    require_tinygrad("Programs kept on disk")
    if isinstance(codegen.to_program_cache, Table):
        return
    codegen.to_program_cache = realize.to_program_cache = Table(store(), "programs", codegen.to_program_cache)
    if Device.DEFAULT.split(":")[0] == "CPU":  # others do without it, and it takes long to import
        import tinygrad.runtime.ops_cpu as ops_cpu

        ops_cpu.do_to_program = codegen.to_program  # what the CPU's own queues run
    schedule.schedule_cache = Table(store(), "schedules", schedule.schedule_cache)
    realize._compile_kernel = _compile_kernel


class Table(dict[Any, UOp]):
    """A table of tinygrad's, backed by what is kept on disk."""

    def __init__(self, kept: Kept, name: str, entries: dict[Any, UOp]) -> None:
        super().__init__(entries)
        self._kept, self._name = kept, name

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        if super().__contains__(key):
            return super().__getitem__(key)
        if (value := self._kept.get(self._name, key)) is None:
            return default
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: Any, value: UOp) -> None:
        super().__setitem__(key, value)
        if value.op is not Ops.PROGRAM:
            self._kept.put(self._name, key, value)
        elif value.src[0].arg.name != _CANDIDATE:
            self._kept.put(self._name, key, _slim(value))


def _compile_kernel(task: tuple[int, tuple[UOp, Any], dict[str, Any]]) -> tuple[int, UOp]:
    """What a compiler's process does. To send the graphs back would take longer than to make them."""
    i, program = _stock_compile_kernel(task)
    return i, _slim(program)


def _slim(program: UOp) -> UOp:
    """A program without the graphs that it was made from, unless tinygrad is going to need these."""
    if program.arg.local_size is None:
        return program
    sink, linear, source, binary = program.src
    parameters = tuple(u for u in linear.src if u.op is Ops.PARAM and u.addrspace != AddrSpace.ALU)
    return program.replace(src=(sink.replace(src=()), linear.replace(src=parameters), source, binary))
