"""tinygrad 0.14.0: compiled programs and schedules are cached on disk between runs.

tinygrad turns tensors into code in Python, which takes seconds for each model and process. Its own disk cache holds
only the compiler's output. Its two in-memory tables of programs and schedules are keyed by content, so with this fix
`engine.cache.disk_cache` backs them, and a model's second start compiles nothing.

Of a program only the parts that a launch and a profile need are stored: names, sizes, parameters, hints, the operations
of `engine.fixes.early_launch`, source and binary. What an instruction that is written as it is takes is not: behind it
lay nearly the whole graph of a product of tensor cores.
"""

from __future__ import annotations

from typing import Any

import tinygrad.codegen as codegen
import tinygrad.engine.realize as realize
import tinygrad.schedule as schedule
from tinygrad import Device
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops, UOp

from engine.cache.disk_cache import DiskCache, disk_cache
from engine.fixes import require_tinygrad

_stock_compile_kernel = realize._compile_kernel
_CANDIDATE = "test"  # tinygrad's search gives its candidates this name


def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError if another version is installed."""
    require_tinygrad("Programs kept on disk")
    if isinstance(codegen.to_program_cache, CachedTable):
        return
    programs = CachedTable(disk_cache(), "programs", codegen.to_program_cache)
    codegen.to_program_cache = realize.to_program_cache = programs
    if Device.DEFAULT.split(":")[0] == "CPU":  # other devices need no CPU queue, and importing it takes long
        import tinygrad.runtime.ops_cpu as ops_cpu

        ops_cpu.do_to_program = codegen.to_program  # otherwise the CPU's queues compile past the table
    schedule.schedule_cache = CachedTable(disk_cache(), "schedules", schedule.schedule_cache)
    realize._compile_kernel = _compile_kernel


class CachedTable(dict[Any, UOp]):
    """One of tinygrad's tables, backed by the table `name` of a disk cache."""

    def __init__(self, cache: DiskCache, name: str, entries: dict[Any, UOp]) -> None:
        super().__init__(entries)
        self._cache, self._name = cache, name

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        if super().__contains__(key):
            return super().__getitem__(key)
        if (value := self._cache.get(self._name, key)) is None:
            return default
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: Any, value: UOp) -> None:
        super().__setitem__(key, value)
        if value.op is not Ops.PROGRAM:
            self._cache.put(self._name, key, value)
        elif value.src[0].arg.name != _CANDIDATE:
            self._cache.put(self._name, key, _without_graphs(value))


def _compile_kernel(task: tuple[int, tuple[UOp, Any], dict[str, Any]]) -> tuple[int, UOp]:
    """Runs in the compiler processes. Sending the graphs back would take longer than building them."""
    i, program = _stock_compile_kernel(task)
    return i, _without_graphs(program)


def _without_graphs(program: UOp) -> UOp:
    """A program without the graphs that it was compiled from, unless tinygrad still needs them."""
    if program.arg.local_size is None:
        return program
    sink, linear, source, binary = program.src
    kept = tuple(u for u in linear.src if _is_buffer(u) or (u.op is Ops.CUSTOM and not u.src))
    return program.replace(src=(sink.replace(src=()), linear.replace(src=kept), source, binary))


def _is_buffer(u: UOp) -> bool:
    return u.op is Ops.PARAM and u.addrspace != AddrSpace.ALU
