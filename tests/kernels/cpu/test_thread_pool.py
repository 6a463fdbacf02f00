"""Threads that run kernels together, and sleep when there are none."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from tinygrad import UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from engine.kernels.cpu import memory
from engine.kernels.cpu.thread_pool import Cores, share_of_time

N = 512


def shifted(part: UOp, parts: UOp, out: UOp, x: UOp) -> UOp:
    """out is x turned by half its length, plus 1: right only if all of a kernel is done before the next."""
    i = UOp.range(N // parts, 1)
    here = part * (N // parts) + i
    store = out.index(here).store(x.index((here + N // 2) % N).load() + 1)
    return store.end(i).sink(arg=KernelInfo(name="shifted", opts_to_apply=()))


def test_cores_meet_between_kernels(cores: Cores) -> None:
    steps = 101
    buffers = [memory.zeros(N, dtypes.float32) for _ in range(steps + 1)]
    launches = cores.launches()
    for source, out in itertools.pairwise(buffers):
        launches.add(shifted, out, source, parts=4)
    walk = launches.captured()
    for turn in range(50):
        memory.view(buffers[0])[:] = np.arange(N) + turn
        walk()
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


def test_kernels_beside_each_other_come_before_the_next(cores: Cores) -> None:
    x, a, b, out = (memory.zeros(N, dtypes.float32) for _ in range(4))
    launches = cores.launches()
    for _ in range(12):
        launches.add(shifted, a, x, parts=4)
        launches.add(shifted, b, x, parts=2, beside=True)
        launches.add(added, out, a, b, parts=4)
        launches.add(shifted, x, out, parts=8)
    walk = launches.captured()
    memory.view(x)[:] = 0
    walk()
    wanted = 0.0
    for _ in range(12):
        wanted = 3 * (wanted + 1) + 1  # whole numbers that a float32 holds
    np.testing.assert_array_equal(memory.view(x), wanted)


def test_a_core_that_waits_long_sleeps(cores: Cores) -> None:
    out, size = memory.zeros(64, dtypes.float32), memory.array(np.array([1 << 26]), dtypes.int32)
    launches = cores.launches()
    launches.add(counting, out, size, parts=1)
    walk = launches.captured()
    walk()
    started, used = time.perf_counter(), time.process_time()
    walk()
    took, used = time.perf_counter() - started, time.process_time() - used
    assert used < 1.5 * took, "the other core does not look on all the time"


def test_a_thread_without_a_cpu_holds_nobody_up() -> None:
    """Two threads that share a CPU: the one that runs does the work, and does not wait for the other's turn."""
    cpu = min(os.sched_getaffinity(0))
    script = f"""
import os, sys, time
os.sched_setaffinity(0, {{{cpu}}})
os.environ.update(DEV="CPU", PARALLEL="0")
from engine.kernels.cpu.thread_pool import Cores
from tests.kernels.cpu.test_thread_pool import N, dtypes, memory, shifted
cores, buffers = Cores(2), [memory.zeros(N, dtypes.float32) for _ in range(2)]
launches = cores.launches()
for _ in range(100):
    launches.add(shifted, *buffers, parts=4)
    launches.add(shifted, *reversed(buffers), parts=4)
walk, took = launches.captured(), []
for _ in range(100):
    started = time.perf_counter()
    walk()
    took.append(time.perf_counter() - started)
print(min(took))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.1, "200 kernels, where each would wait for a turn of the scheduler"


def test_idle_threads_sleep(cores: Cores) -> None:
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25, "one that looked on would take it all"


def test_it_keeps_to_the_cpus_it_may_use() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = f"""
import os
os.sched_setaffinity(0, {{{cpu}}})
from engine.kernels.cpu.thread_pool import usable_cpus
print(usable_cpus())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([cpu])


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
    ],
)
def test_it_keeps_to_its_share_of_time(tmp_path, files: dict[str, str], wanted: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert share_of_time(tmp_path) == wanted


def test_a_kernel_of_those_beside_each_other_ends_when_it_is_run_alone() -> None:
    """The thread that asked for it may have gone to sleep by then."""
    script = """
import ctypes
from engine.backends import prepare
from engine.events import EngineOptions
prepare(EngineOptions(model_path="", backend="CPU"))
from engine.kernels.cpu.thread_pool import Cores
cores = Cores(2)
pause = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value  # for the number of its piece
first = cores.add(pause, (), 300)
cores.add(pause, (), 1, beside=True)
for _ in range(10):
    cores.run(first, 1)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_whoever_sleeps_is_woken() -> None:
    """Threads that sleep whenever they have to wait, more of them than CPUs: none is forgotten."""
    script = """
from engine.backends import prepare
from engine.events import EngineOptions
prepare(EngineOptions(model_path="", backend="CPU"))
from engine.kernels.cpu import memory
from engine.kernels.cpu import thread_program
thread_program.LOOKS = 0
from engine.kernels.cpu.thread_pool import Cores
from tests.kernels.cpu.test_thread_pool import N, dtypes, shifted
cores, (a, b, c) = Cores(3), [memory.zeros(N, dtypes.float32) for _ in range(3)]
launches = cores.launches()
for _ in range(10):
    launches.add(shifted, b, a, parts=4)
    launches.add(shifted, c, a, parts=2, beside=True)
    launches.add(shifted, a, b, parts=1)
walk = launches.captured()
for i in range(300):
    walk()
    thread_program.seconds(i % 30)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
