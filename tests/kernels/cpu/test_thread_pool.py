"""Threads that run kernels together, and sleep when there are none."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
from tinygrad import UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.thorough import thorough

N = 512


def shifted(part: UOp, parts: UOp, out: UOp, x: UOp) -> UOp:
    """out is x turned by half its length, plus 1: right only if all of a kernel is done before the next."""
    i = UOp.range(N // parts, 1)
    here = part * (N // parts) + i
    store = out.index(here).store(x.index((here + N // 2) % N).load() + 1)
    return store.end(i).sink(arg=KernelInfo(name="shifted", opts_to_apply=()))


def test_a_kernel_starts_after_the_one_before_it(pool: ThreadPool) -> None:
    steps = 101
    buffers = [memory.zeros(N, dtypes.float32) for _ in range(steps + 1)]
    sequence = KernelSequence(pool)
    for source, out in itertools.pairwise(buffers):
        sequence.add(shifted, out, source, parts=4)
    run = sequence.compile()
    for turn in range(50):
        memory.view(buffers[0])[:] = np.arange(N) + turn
        run()
        wanted = np.roll(np.arange(N), N // 2) + turn + steps
        np.testing.assert_array_equal(memory.view(buffers[-1]), wanted)


def added(part: UOp, parts: UOp, out: UOp, x: UOp, y: UOp) -> UOp:
    i = UOp.range(N // parts, 1)
    at = part * (N // parts) + i
    store = out.index(at).store(x.index(at).load() + y.index(at).load() * 2)
    return store.end(i).sink(arg=KernelInfo(name="added", opts_to_apply=()))


def counting(part: UOp, parts: UOp, out: UOp, size: UOp) -> UOp:
    """Counts to a number, a step of memory at a time."""
    i = UOp.range(size.index(0).load(), 1)
    store = out.index(part * 64).store(out.after(i).index(part * 64).load() + 1 / parts.cast(dtypes.float32))
    return store.end(i).sink(arg=KernelInfo(name="counting", opts_to_apply=()))


def test_concurrent_kernels_are_done_before_the_next(pool: ThreadPool) -> None:
    x, a, b, out = (memory.zeros(N, dtypes.float32) for _ in range(4))
    sequence = KernelSequence(pool)
    for _ in range(12):
        sequence.add(shifted, a, x, parts=4)
        sequence.add(shifted, b, x, parts=2, concurrent=True)
        sequence.add(added, out, a, b, parts=4)
        sequence.add(shifted, x, out, parts=8)
    run = sequence.compile()
    memory.view(x)[:] = 0
    run()
    wanted = 0.0
    for _ in range(12):
        wanted = 3 * (wanted + 1) + 1  # whole numbers that a float32 holds
    np.testing.assert_array_equal(memory.view(x), wanted)


def test_a_thread_that_waits_long_sleeps(pool: ThreadPool) -> None:
    out, size = memory.zeros(64, dtypes.float32), memory.array(np.array([1 << 26]), dtypes.int32)
    sequence = KernelSequence(pool)
    sequence.add(counting, out, size, parts=1)
    run = sequence.compile()
    run()
    started, used = time.perf_counter(), time.process_time()
    run()
    took, used = time.perf_counter() - started, time.process_time() - used
    assert used < 1.5 * took, "the other thread does not poll all the time"


@thorough  # it is timed
def test_a_thread_without_a_cpu_holds_nobody_up() -> None:
    """Two threads that share a CPU: the one that runs does the work, and does not wait for the other's turn."""
    cpu = min(os.sched_getaffinity(0))
    script = f"""
import os, sys, time
os.sched_setaffinity(0, {{{cpu}}})
os.environ.update(DEV="CPU", PARALLEL="0")
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.kernels.cpu.test_thread_pool import N, dtypes, memory, shifted
pool, buffers = ThreadPool(2), [memory.zeros(N, dtypes.float32) for _ in range(2)]
sequence = KernelSequence(pool)
for _ in range(100):
    sequence.add(shifted, *buffers, parts=4)
    sequence.add(shifted, *reversed(buffers), parts=4)
run, took = sequence.compile(), []
for _ in range(100):
    started = time.perf_counter()
    run()
    took.append(time.perf_counter() - started)
print(min(took))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.1, "200 kernels, where each would wait for a turn of the scheduler"


def test_idle_threads_sleep(pool: ThreadPool) -> None:
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25, "a thread that polled would use all of it"


@thorough
def test_one_of_several_concurrent_kernels_ends_when_it_runs_alone() -> None:
    """The thread that asked for it may have gone to sleep by then."""
    script = """
import ctypes
from engine.backends import prepare
from engine.protocol.events import EngineOptions
prepare(EngineOptions(model_path="", backend="CPU"))
from engine.targets.cpu.kernels.thread_pool import ThreadPool
pool = ThreadPool(2)
pause = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value  # for as many microseconds as its part's number
first = pool.add(pause, (), 300)
pool.add(pause, (), 1, concurrent=True)
for _ in range(10):
    pool.run(first, 1)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@thorough
def test_every_sleeping_thread_is_woken() -> None:
    """Threads that sleep whenever they have to wait, more of them than CPUs: none is forgotten."""
    script = """
from engine.backends import prepare
from engine.protocol.events import EngineOptions
prepare(EngineOptions(model_path="", backend="CPU"))
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels import thread_program
thread_program.MAX_POLLS = 0
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from tests.kernels.cpu.test_thread_pool import N, dtypes, shifted
pool, (a, b, c) = ThreadPool(3), [memory.zeros(N, dtypes.float32) for _ in range(3)]
sequence = KernelSequence(pool)
for _ in range(10):
    sequence.add(shifted, b, a, parts=4)
    sequence.add(shifted, c, a, parts=2, concurrent=True)
    sequence.add(shifted, a, b, parts=1)
run = sequence.compile()
for i in range(300):
    run()
    run.call_s(i % 30)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
