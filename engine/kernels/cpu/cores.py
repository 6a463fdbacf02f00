"""Threads, one a core, that run a sequence of kernels together: the CPU's counterpart of a GPU's graph
launch.

tinygrad 0.14.0 runs a kernel's threads one after another, and every kernel costs it some 12 µs. Here each
core has a thread that walks the same list of kernels. A kernel is called on every core at the same time, with
the number of the core as its first argument, and all cores meet before the next one. The walk is a UOp
program as kernels are; between two kernels there is no Python, and with nothing to do the threads sleep.

Meeting: a core counts the kernels it has done in a cache line of its own, and waits until all counts are
there. A fence before a core's count makes its results visible to those who see the count; one after the wait
keeps loads of the next kernel from going ahead of it. Both are needed on Arm, where neither order is given.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.dtype import AddrSpace, DType
from tinygrad.engine.realize import compile_linear, get_runtime
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop.ops import KernelInfo, Ops

from engine.fixes import cpu_vectors
from engine.kernels.cpu import memory

Kernel = Callable[..., UOp]

_WORDS = 32  # of a call: the kernel's address and up to 31 buffers
_LINE = 8  # words of a cache line, so that no two cores write to the same one
_MAX_CALLS = 1 << 16
_ANY = 1 << 40
_POLLS = 1 << 12  # looks at another core's count before the scheduler is asked to run something else


@functools.cache  # asked before threads are given CPUs of their own
def allowed_cpus() -> frozenset[int]:
    """CPUs that this process is allowed on (taskset, cpusets); none where the system does not say."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


@functools.cache
def usable_cpus() -> list[int]:
    """CPUs to keep busy: one hardware thread of each core that this process is allowed on, and no more of them
    than its control group has CPU time for."""
    cores: dict[str, int] = {}
    for cpu in sorted(allowed_cpus()) or range(os.cpu_count() or 1):
        siblings = _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.setdefault(siblings or str(cpu), cpu)
    return list(cores.values())[: max(1, int(min(share_of_time(), len(cores))))]


def share_of_time(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU time a second that the control group grants, in cores (cgroup v2 cpu.max, v1 cpu.cfs_quota_us)."""
    quota, period = (_read(cgroup / "cpu.max") or "max 1").split()
    if quota == "max":
        quota, period = (_read(cgroup / f"cpu/cpu.cfs_{what}_us") for what in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() else float("inf")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def core_number(cores: int, slot: int = 0) -> UOp:
    """A kernel's first argument, where there are several cores: which of them it runs on."""
    if cores == 1:
        return UOp.const(0)
    return UOp.param(slot, dtypes.int, (), vmin_vmax=(0, cores - 1), name="core", addrspace=AddrSpace.ALU)


_sleeping: list[Cores] = []  # threads never end, so what they look at must not go either


class Cores:
    """`count` threads, the caller's own among them. Not to be used from two threads at a time.

    With as many CPUs as threads each gets its own, and the caller what is left, or else the scheduler may put
    two of them on one CPU, where they wait for each other."""

    def __init__(self, count: int) -> None:
        cpu_vectors.apply()
        self.count = count
        self._calls = _words(_MAX_CALLS * _WORDS)
        self._counts, self._job = _words(count * _LINE), _words(_LINE)
        self._left: frozenset[int] = frozenset()  # the calling thread's CPUs, if others have theirs
        self._programs: dict[tuple[Kernel, tuple[DType, ...]], UOp] = {}
        self._n_calls, self._n_done = 1, 0  # the first two calls change from use to use
        self._libc = ctypes.CDLL(None)
        nothing = _compiled(UOp.sink, "nothing")  # what most polls call in place of the scheduler
        functions = _words(_LINE)
        functions[:3] = [_address(self._libc.sem_wait), _address(self._libc.sched_yield), nothing.addr]
        shared = [self._calls, self._job, self._counts, functions]
        self._arguments = _pointers(*shared[: 4 if count > 1 else 2])
        self._walk = _compiled(functools.partial(_walk, count), "walk")
        self._keep: list[Any] = [nothing, functions]  # whatever is called or read by address
        self._semaphores = [_words(_LINE) for _ in range(1, count)]
        self._idle = self.add(nothing.addr, (), None)
        if count > 1:
            self._start_others()

    def _start_others(self) -> None:
        _sleeping.append(self)
        walk = _compiled(functools.partial(_walk_forever, self.count), "walk_forever")
        self._keep.append(walk)
        cpus = usable_cpus()
        own = cpus[1:] if allowed_cpus() and len(cpus) == self.count else []

        def work(core: int) -> None:
            if own:
                os.sched_setaffinity(0, {own[core - 1]})  # of this thread
            walk.fxn(*self._arguments, *_pointers(self._semaphores[core - 1]), ctypes.c_uint64(core))

        for core, semaphore in enumerate(self._semaphores, 1):
            if self._libc.sem_init(ctypes.c_void_p(semaphore.ctypes.data), 0, 0):
                raise OSError(ctypes.get_errno(), "sem_init")
            threading.Thread(target=work, args=[core], daemon=True, name=f"core {core}").start()
        if own:
            self._left = allowed_cpus() - set(own)
            os.sched_setaffinity(0, self._left)

    def launches(self) -> Launches:
        return Launches(self)

    def compiled(self, kernels: Sequence[tuple[Kernel, tuple[DType, ...]]]) -> list[UOp]:
        """The programs of kernels for buffers of these types. What is not compiled yet is, several at a
        time."""
        new = [kind for kind in dict.fromkeys(kernels) if kind not in self._programs]
        if new:
            anything = UOp.new_buffer("CPU", 1, dtypes.uint8)
            sinks = [self._sink(*kind) for kind in new]
            with self._anywhere():
                linear = compile_linear(UOp(Ops.LINEAR, src=tuple(sink.call(anything) for sink in sinks)))
            self._programs.update(zip(new, (call.src[0] for call in linear.src), strict=True))
        for kind in new:
            info, types = self._programs[kind].arg, kind[1]
            assert list(info.globals) == list(range(1, len(types) + 1)), f"{info.name} leaves a buffer unused"
            assert self.count == 1 or info.vars, f"{info.name} is the same for all cores"
        return [self._programs[kind] for kind in kernels]

    @contextmanager
    def _anywhere(self) -> Iterator[None]:
        """Gives the calling thread all CPUs back, and with it the compilers that it starts."""
        if self._left:
            os.sched_setaffinity(0, allowed_cpus())
        yield
        if self._left:
            os.sched_setaffinity(0, self._left)

    def _sink(self, kernel: Kernel, types: tuple[DType, ...]) -> UOp:
        buffers = (UOp.placeholder((_ANY,), dtype, slot=i + 1) for i, dtype in enumerate(types))
        return kernel(core_number(self.count), *buffers)

    def run_once(self, program: UOp, buffers: Sequence[int]) -> None:
        """Runs a program on buffers at these addresses, on all cores."""
        self._write(0, get_runtime("CPU", program).addr, buffers)
        self.run(0, 1)

    def run(self, first: int, count: int) -> None:
        """Runs `count` calls from `first` on, on all cores, and returns when all are done."""
        self._job[:3] = first, count, self._n_done
        self._n_done += count
        for semaphore in self._semaphores:
            self._libc.sem_post(ctypes.c_void_p(semaphore.ctypes.data))
        self._walk.fxn(*self._arguments, ctypes.c_uint64(0))

    def seconds(self, call: int) -> float:
        """Runs a call once more, on all cores: how long it takes, apart from waking them."""
        rows, taken = self._calls.reshape(-1, _WORDS), []
        for second in (self._idle, call):
            rows[0], rows[1] = rows[self._idle], rows[second]
            started = time.perf_counter()
            self.run(0, 2)
            taken.append(time.perf_counter() - started)
        return max(taken[1] - taken[0], 1e-7)

    def add(self, address: int, buffers: Sequence[int], keep: Any) -> int:
        """Adds a call of the kernel at `address`, to `run`; returns its index."""
        self._n_calls += 1
        self._write(self._n_calls, address, buffers)
        self._keep.append(keep)
        return self._n_calls

    def _write(self, call: int, address: int, buffers: Sequence[int]) -> None:
        if len(buffers) >= _WORDS:
            raise ValueError(f"a kernel takes up to {_WORDS - 1} buffers, not {len(buffers)}")
        self._calls[call * _WORDS : call * _WORDS + 1 + len(buffers)] = [address, *buffers]


class Launches:
    """Kernels in the order in which they are added, over buffers that stay where they are."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._added: list[tuple[Kernel, tuple[Tensor, ...]]] = []

    def add(self, kernel: Kernel, *buffers: Tensor) -> None:
        """`kernel` is called with the core's number and a placeholder for each buffer, which may be of any
        size; the same function means the same kernel. Buffers are `memory`'s, and every one of them is
        used."""
        self._added.append((kernel, buffers))

    def captured(self) -> Walk:
        """Compiles what is not compiled yet."""
        kinds = [(kernel, tuple(b.dtype for b in buffers)) for kernel, buffers in self._added]
        steps, indices = [], []
        for program, (_, buffers) in zip(self._cores.compiled(kinds), self._added, strict=True):
            address = get_runtime("CPU", program).addr
            indices.append(self._cores.add(address, [memory.address(b) for b in buffers], buffers))
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
        """The steps as tinygrad writes them. Buffers are numbered from 1, since the core's number comes
        first."""
        return [
            program.call(buffers[0].uop.base, *(b.uop.base for b in buffers))
            for program, buffers in self.steps
        ]


# --- the walk, in UOps ---------------------------------------------------------------------------------


def _shared() -> list[UOp]:
    """calls, job (first call, how many, kernels done before), counts, functions (see `Cores`)."""
    sizes = ((_MAX_CALLS * _WORDS, True), (_LINE, True), (_LINE, True), (_LINE, False))
    return [UOp.param(i, dtypes.uint64, (n,), volatile=v) for i, (n, v) in enumerate(sizes)]


def _walk(cores: int) -> UOp:
    calls, job, counts, functions = _shared()
    core = core_number(cores, 4)
    return _job(cores, calls, counts, job, functions, core)


def _walk_forever(cores: int) -> UOp:
    """Waits for a job, does this core's part of it, and so on."""
    calls, job, counts, functions = _shared()
    semaphore = UOp.param(4, dtypes.uint64, (_LINE,))
    core = core_number(cores, 5)
    turn = UOp.range(2**64 - 1, 10, dtype=dtypes.uint64)
    asleep = UOp.loop(11)
    woken = (
        functions.after(asleep, turn)
        .index(0)
        .load()
        .call(semaphore.after(turn).index(0), ret_dtype=dtypes.int)
    )
    ready = woken.end(asleep, woken.ne(0))  # a signal may interrupt the wait
    return _job(cores, calls, counts, job.after(ready), functions, core).end(turn)


def _job(cores: int, calls: UOp, counts: UOp, job: UOp, functions: UOp, core: UOp) -> UOp:
    first, n, before = (job.index(i).load() for i in range(3))
    k = UOp.range(n, 0, dtype=dtypes.uint64)
    address, *arguments = (calls.index((first + k) * _WORDS + i).load() for i in range(_WORDS))
    call = address.call(*([core] if cores > 1 else []), *arguments, ret_dtype=dtypes.void)
    if cores == 1:
        return call.end(k)
    done = before + k + 1
    counted = counts.after(UOp(Ops.BARRIER, src=(call,))).index(core.cast(dtypes.uint64) * _LINE).store(done)
    other = UOp.range(cores, 1, dtype=dtypes.uint64)
    polls = UOp.placeholder((1,), dtypes.uint64, 0, AddrSpace.REG)
    polls = polls.after(polls.after(counted, other).index(0).store(0))
    waiting = UOp.loop(2)
    poll = polls.after(waiting).index(0).load() + 1
    polled = polls.after(waiting).index(0).store(poll)
    seen = counts.after(polled).index(other * _LINE).load()
    pause = (poll % _POLLS).eq(0).where(functions.index(1).load(), functions.index(2).load())
    paused = pause.call(seen, ret_dtype=dtypes.void)
    met = paused.end(waiting, seen < done).end(other)
    return UOp(Ops.BARRIER, src=(met,)).end(k)


# --- memory and programs -------------------------------------------------------------------------------


def _words(n: int) -> NDArray[np.uint64]:
    """Zeros on a cache line of their own. Pages that are never used take no memory."""
    raw = np.zeros(n + _LINE, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    return raw[skip : skip + n]


def _pointers(*arrays: NDArray[np.uint64]) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(a.ctypes.data) for a in arrays]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _compiled(body: Callable[[], UOp], name: str) -> CPUProgram:
    device = Device["CPU"]
    sink = body().sink(arg=KernelInfo(name), tag=1)  # the tag: nothing in it to optimize
    return CPUProgram(device, to_program(sink, device.renderer).to_elf())
