"""A pool of threads, one for each core, that run jobs of kernels together: the CPU's counterpart of a graph launch.

tinygrad 0.14.0 runs the threads of a kernel one after another, and each kernel costs some 12 µs of Python. Here every
thread runs the same compiled program (`thread_program`), which takes parts of the job's kernels until none is left.
There is no Python between two kernels, and idle threads sleep.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.engine.realize import get_runtime
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop.ops import KernelInfo, Ops

from engine.devices.cpus import worker_cpus
from engine.fixes import cpu_vectors
from engine.kernels.compilation import KernelFunction, compile_calls, program_or_graph
from engine.targets.cpu.kernels.thread_program import (
    BUFFERS,
    CALL_WORDS,
    FIRST_PART,
    GROUP_END,
    GROUP_START,
    JOB_END,
    JOB_FIRST,
    LINE,
    N_PARTS,
    memory_sizes,
    nothing,
    thread_program,
)

KernelTypes = tuple[KernelFunction, tuple[DType, ...]]
"""A kernel's function, and the types of its buffers."""

MAX_PARTS = 1 << 15
_ANY_SIZE = 1 << 40  # elements of a placeholder: one program serves buffers of all sizes


def part_arguments() -> tuple[UOp, UOp]:
    """A kernel's first two arguments, int32: the number of the part to compute, and how many parts there are."""
    bounds = {"part": (0, MAX_PARTS - 1), "parts": (1, MAX_PARTS)}
    part, parts = (
        UOp.param(slot, dtypes.int, (), vmin_vmax=bound, name=name, addrspace=AddrSpace.ALU)
        for slot, (name, bound) in enumerate(bounds.items())
    )
    return part, parts


_running: list[ThreadPool] = []  # threads never end, so the memory that they poll must stay


class ThreadPool:
    """`count` threads, including the caller's. Only one thread may call it at a time. Raises OSError if the system
    provides no semaphores."""

    def __init__(self, count: int) -> None:
        cpu_vectors.apply()
        self.count = count
        self._memory = {name: _zeroed_words(n) for name, n in memory_sizes(count).items()}
        self._calls, self._queue = self._memory["calls"].reshape(-1, CALL_WORDS), self._memory["queue"]
        self._arguments = [ctypes.c_uint64(words.ctypes.data) for words in self._memory.values()]
        self._programs: dict[KernelTypes, UOp] = {}
        self._n_calls, self._n_parts = 1, 0  # call 0 has no parts
        self._libc = ctypes.CDLL(None)
        self._thread_program, self._nothing = _load((thread_program, count), (nothing,))
        functions = (self._libc.sem_wait, self._libc.sem_post, self._libc.sched_yield)
        self._memory["functions"][:4] = [*map(_address, functions), self._nothing.addr]
        for semaphore in self._memory["semaphores"].reshape(count, LINE):
            if self._libc.sem_init(ctypes.c_void_p(semaphore.ctypes.data), 0, 0):
                raise OSError(ctypes.get_errno(), "sem_init")
        self._empty_call = self.add(self._nothing.addr, (), 1)
        if count > 1:
            self._start_threads()

    def _start_threads(self) -> None:
        _running.append(self)
        for number in range(1, self.count):
            arguments = [*self._arguments, ctypes.c_uint64(number)]
            name, function = f"core {number}", self._thread_program.fxn
            threading.Thread(target=function, args=arguments, daemon=True, name=name).start()

    def compile(self, kernels: Sequence[KernelTypes]) -> list[UOp]:
        """The programs of kernels for buffers of these types. New ones are compiled at the same time."""
        new = [key for key in dict.fromkeys(kernels) if key not in self._programs]
        if new:
            graphs = [program_or_graph(key, functools.partial(_graph, *key)) for key in new]
            self._programs.update(zip(new, _compiled(graphs), strict=True))
        for key in new:
            info, types = self._programs[key].arg, key[1]
            assert list(info.globals) == list(range(2, len(types) + 2)), f"{info.name} leaves a buffer unused"
            assert len(info.vars) == 2, f"{info.name} does not use its part and the number of parts"
        return [self._programs[key] for key in kernels]

    def run_once(self, program: UOp, buffers: Sequence[int], parts: int) -> None:
        """Runs a program on buffers at these addresses, in `parts` parts."""
        self.run(self.add(get_runtime("CPU", program).addr, buffers, parts), 1)

    def run(self, first: int, count: int) -> None:
        """Runs the job of `count` calls from index `first` on, and returns when all are done."""
        last = self._calls[first + count - 1]
        self._queue[JOB_FIRST] = self._calls[first, FIRST_PART]
        self._queue[JOB_END] = last[FIRST_PART] + last[N_PARTS]
        self._thread_program.fxn(*self._arguments, ctypes.c_uint64(0))

    def call_s(self, call: int) -> float:
        """Runs a call alone: the seconds that it takes, without the start and the end of a job."""
        ends_s = []
        for each in (self._empty_call, self._empty_call, call):  # the first wakes the threads
            self.run(each, 1)
            ends_s.append(time.perf_counter())
        return max(ends_s[2] - ends_s[1] - (ends_s[1] - ends_s[0]), 1e-7)

    def add(self, address: int, buffers: Sequence[int], parts: int, concurrent: bool = False) -> int:
        """Adds a call of the kernel at `address` and returns its index. `concurrent`: the call does not depend on the
        call before it, nor on those that are concurrent with that one, and may start when they may. Raises ValueError
        for too many buffers."""
        limit = CALL_WORDS - BUFFERS
        if len(buffers) > limit:
            raise ValueError(f"a kernel takes up to {limit} buffers, not {len(buffers)}")
        call, first = self._n_calls, self._n_parts
        group_start = int(self._calls[call - 1, GROUP_START]) if concurrent else first
        self._n_calls, self._n_parts = call + 1, first + parts
        words = (address, parts, first, group_start, self._n_parts, *buffers)
        self._calls[call, : len(words)] = words
        while concurrent and call > 1 and self._calls[call - 1, GROUP_START] == group_start:
            call -= 1
            self._calls[call, GROUP_END] = self._n_parts
        return self._n_calls - 1


@functools.cache
def default_pool() -> ThreadPool:
    """The pool of this process: a thread for each CPU that it should compute on."""
    return ThreadPool(len(worker_cpus()))


def _zeroed_words(n: int) -> NDArray[np.uint64]:
    """n words of 64 bits that begin on a cache line. Pages that are never touched take no memory."""
    raw = np.zeros(n + LINE, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _graph(kernel: KernelFunction, types: tuple[DType, ...]) -> UOp:
    buffers = (UOp.placeholder((_ANY_SIZE,), dtype, slot=i + 2) for i, dtype in enumerate(types))
    return kernel(*part_arguments(), *buffers)


def _load(*programs: tuple[Callable[..., UOp], *tuple[int, ...]]) -> list[CPUProgram]:
    """Compiles and loads programs that Python calls: functions that return a graph, with their arguments."""

    def build(function: Callable[..., UOp], *arguments: int) -> UOp:
        body = function(*arguments)
        info = KernelInfo(function.__name__, estimates=Estimates())
        return body.sink(arg=info, tag=1)  # as `KernelBuilder.finish` does

    graphs = [program_or_graph(program, functools.partial(build, *program)) for program in programs]
    return [CPUProgram(Device["CPU"], program.to_elf()) for program in _compiled(graphs)]


def _compiled(graphs: Sequence[UOp]) -> list[UOp]:
    placeholder = UOp.new_buffer("CPU", 1, dtypes.uint8)  # tinygrad compiles calls, and these need a buffer
    calls = tuple(graph.call(placeholder) for graph in graphs)
    return [call.src[0] for call in compile_calls(UOp(Ops.LINEAR, src=calls)).src]
