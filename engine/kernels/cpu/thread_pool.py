"""Threads, one a core, that run a sequence of kernels together: the CPU's counterpart of a GPU's graph
launch.

tinygrad 0.14.0 runs a kernel's threads one after another, and every kernel costs it some 12 µs. Here each
core has a thread that walks the same list of kernels, each cut into pieces, and takes the next piece that
nobody has taken (`walk`). The walk is a UOp program as kernels are; between two kernels there is no Python,
and with nothing to do the threads sleep.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.engine.realize import get_runtime
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop.ops import KernelInfo, Ops

from engine.devices.system_files import read_text
from engine.fixes import cpu_vectors
from engine.kernels.cpu import memory, thread_program
from engine.kernels.launch import compiled, known_or_made

Kernel = Callable[..., UOp]
Kind = tuple[Kernel, tuple[DType, ...]]

MAX_PARTS = 1 << 15
_ANY = 1 << 40


def allowed_cpus() -> frozenset[int]:
    """CPUs that this process is allowed on (taskset, cpusets); none where the system does not say."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


@functools.cache
def usable_cpus() -> list[int]:
    """CPUs to keep busy: one hardware thread of each core that this process is allowed on, and no more of them
    than its control group has CPU time for."""
    cores: dict[str, int] = {}
    for cpu in sorted(allowed_cpus()) or range(os.cpu_count() or 1):
        siblings = read_text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.setdefault(siblings or str(cpu), cpu)
    return list(cores.values())[: max(1, int(min(share_of_time(), len(cores))))]


def share_of_time(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU time a second that the control group grants, in cores (cgroup v2 cpu.max, v1 cpu.cfs_quota_us)."""
    quota, period = (read_text(cgroup / "cpu.max") or "max 1").split()
    if quota == "max":
        quota, period = (read_text(cgroup / f"cpu/cpu.cfs_{what}_us") for what in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() else float("inf")


def piece_of_work() -> tuple[UOp, UOp]:
    """A kernel's first arguments: which of its pieces to compute, of how many."""
    bounds = {"part": (0, MAX_PARTS - 1), "parts": (1, MAX_PARTS)}
    part, parts = (
        UOp.param(slot, dtypes.int, (), vmin_vmax=bound, name=name, addrspace=AddrSpace.ALU)
        for slot, (name, bound) in enumerate(bounds.items())
    )
    return part, parts


_sleeping: list[Cores] = []  # threads never end, so what they look at must not go either


class Cores:
    """`count` threads, the caller's own among them. Not to be used from two threads at a time."""

    def __init__(self, count: int) -> None:
        cpu_vectors.apply()
        self.count = count
        self._memory = {name: _words(n) for name, n in thread_program.memory_sizes(count).items()}
        self._calls, self._queue = (
            self._memory["calls"].reshape(-1, thread_program.WORDS),
            self._memory["queue"],
        )
        self._arguments = [ctypes.c_uint64(words.ctypes.data) for words in self._memory.values()]
        self._programs: dict[Kind, UOp] = {}
        self._n_calls, self._n_pieces = 1, 0  # call 0 has no pieces
        self._libc = ctypes.CDLL(None)
        self._walk, nothing = _called((thread_program.walk, count), (thread_program.nothing,))
        functions = (self._libc.sem_wait, self._libc.sem_post, self._libc.sched_yield)
        self._memory["functions"][:4] = [*map(_address, functions), nothing.addr]
        self._keep: list[Any] = [nothing]  # whatever is called or read by address
        for semaphore in self._memory["semaphores"].reshape(count, thread_program.LINE):
            if self._libc.sem_init(ctypes.c_void_p(semaphore.ctypes.data), 0, 0):
                raise OSError(ctypes.get_errno(), "sem_init")
        self._idle = self.add(nothing.addr, (), 1)
        if count > 1:
            self._start_others()

    def _start_others(self) -> None:
        _sleeping.append(self)
        for core in range(1, self.count):
            arguments = [*self._arguments, ctypes.c_uint64(core)]
            threading.Thread(target=self._walk.fxn, args=arguments, daemon=True, name=f"core {core}").start()

    def launches(self) -> Launches:
        return Launches(self)

    def compiled(self, kernels: Sequence[Kind]) -> list[UOp]:
        """The programs of kernels for buffers of these types. What is not compiled yet is, several at a
        time."""
        new = [kind for kind in dict.fromkeys(kernels) if kind not in self._programs]
        if new:
            graphs = [known_or_made(kind, functools.partial(self._graph, *kind)) for kind in new]
            self._programs.update(zip(new, _programs(graphs), strict=True))
        for kind in new:
            info, types = self._programs[kind].arg, kind[1]
            assert list(info.globals) == list(range(2, len(types) + 2)), f"{info.name} leaves a buffer unused"
            assert len(info.vars) == 2, f"{info.name} does not ask for its part"
        return [self._programs[kind] for kind in kernels]

    def _graph(self, kernel: Kernel, types: tuple[DType, ...]) -> UOp:
        buffers = (UOp.placeholder((_ANY,), dtype, slot=i + 2) for i, dtype in enumerate(types))
        return kernel(*piece_of_work(), *buffers)

    def run_once(self, program: UOp, buffers: Sequence[int], parts: int) -> None:
        """Runs a program on buffers at these addresses, on all cores."""
        self.run(self.add(get_runtime("CPU", program).addr, buffers, parts), 1)

    def run(self, first: int, count: int) -> None:
        """Runs `count` calls from `first` on, on all cores, and returns when all are done."""
        last = self._calls[first + count - 1]
        self._queue[thread_program.JOB_FIRST] = self._calls[first, thread_program.FIRST]
        self._queue[thread_program.JOB_END] = last[thread_program.FIRST] + last[thread_program.PARTS]
        self._walk.fxn(*self._arguments, ctypes.c_uint64(0))

    def seconds(self, call: int) -> float:
        """Runs a call once more, on all cores: how long it takes, apart from waking them."""
        times = []
        for each in (self._idle, self._idle, call):  # the first wakes the threads
            self.run(each, 1)
            times.append(time.perf_counter())
        return max(times[2] - times[1] - (times[1] - times[0]), 1e-7)

    def add(self, address: int, buffers: Sequence[int], parts: int, beside: bool = False) -> int:
        """Adds a call of the kernel at `address`, to `run`; returns its index. `beside`: it needs nothing of
        the call that was added before, nor of those that this one was added beside, and may run when they
        may."""
        if len(buffers) > thread_program.WORDS - thread_program.BUFFERS:
            raise ValueError(
                f"a kernel takes up to {thread_program.WORDS - thread_program.BUFFERS} buffers, not {len(buffers)}"
            )
        call, first = self._n_calls, self._n_pieces
        after = int(self._calls[call - 1, thread_program.AFTER]) if beside else first
        self._n_calls, self._n_pieces = call + 1, first + parts
        words = (address, parts, first, after, self._n_pieces, *buffers)
        self._calls[call, : len(words)] = words
        while beside and call > 1 and self._calls[call - 1, thread_program.AFTER] == after:
            call -= 1
            self._calls[call, thread_program.UNTIL] = self._n_pieces
        return self._n_calls - 1


@functools.cache
def all_cores() -> Cores:
    """The threads that this process computes with: a thread for each CPU that it may use."""
    return Cores(len(usable_cpus()))


class Launches:
    """Kernels in the order in which they are added, over buffers that stay where they are."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._added: list[tuple[Kernel, tuple[Tensor, ...], int, bool]] = []

    def add(self, kernel: Kernel, *buffers: Tensor, parts: int = 0, beside: bool = False) -> None:
        """`kernel` is called with the piece of its work to do and of how many, and a placeholder for each
        buffer, which may be of any size; the same function means the same kernel. Buffers are `memory`'s, and
        every one of them is used. `parts`: pieces, one a core unless told; they may be computed in any order.
        `beside`: see `Cores.add`."""
        self._added.append((kernel, buffers, parts or self._cores.count, beside))

    @property
    def kinds(self) -> list[Kind]:
        """The kernels, and the types of their buffers."""
        return [(kernel, tuple(b.dtype for b in buffers)) for kernel, buffers, *_ in self._added]

    def captured(self) -> Walk:
        """Compiles what is not compiled yet."""
        steps: list[tuple[UOp, tuple[Tensor, ...]]] = []
        indices = []
        for program, (_, buffers, parts, beside) in zip(
            self._cores.compiled(self.kinds), self._added, strict=True
        ):
            address = get_runtime("CPU", program).addr
            addresses = [memory.address(b) for b in buffers]
            indices.append(self._cores.add(address, addresses, parts, beside and bool(steps)))
            steps.append((program, buffers))
        return Walk(self._cores, indices[0], steps)


@dataclass(frozen=True)
class Walk:
    """A sequence of programs and what they work on. Called, it runs and returns when it is done."""

    cores: Cores
    first: int
    steps: Sequence[tuple[UOp, tuple[Tensor, ...]]]

    def __call__(self) -> None:
        self.cores.run(self.first, len(self.steps))

    def seconds(self, i: int) -> float:
        """Runs the i-th step alone: how long it took."""
        return self.cores.seconds(self.first + i)

    @functools.cached_property
    def calls(self) -> list[UOp]:
        """The steps as tinygrad writes them. Buffers are numbered from 2, since the pieces come
        first."""
        return [
            program.call(*[buffers[0].uop.base] * 2, *(b.uop.base for b in buffers))
            for program, buffers in self.steps
        ]


# --- memory and programs -------------------------------------------------------------------------------


def _words(n: int) -> NDArray[np.uint64]:
    """Zeros on a cache line of their own. Pages that are never used take no memory."""
    raw = np.zeros(n + thread_program.LINE, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _called(*programs: tuple[Callable[..., UOp], *tuple[int, ...]]) -> list[CPUProgram]:
    """Programs that are called from here: functions and what they take to be written."""

    def made(function: Callable[..., UOp], *arguments: int) -> UOp:
        body = function(*arguments)
        return body.sink(arg=KernelInfo(function.__name__), tag=1)  # the tag: nothing in it to optimize

    graphs = [known_or_made(program, functools.partial(made, *program)) for program in programs]
    return [CPUProgram(Device["CPU"], program.to_elf()) for program in _programs(graphs)]


def _programs(graphs: Sequence[UOp]) -> list[UOp]:
    anything = UOp.new_buffer("CPU", 1, dtypes.uint8)
    calls = tuple(graph.call(anything) for graph in graphs)
    return [call.src[0] for call in compiled(UOp(Ops.LINEAR, src=calls)).src]
