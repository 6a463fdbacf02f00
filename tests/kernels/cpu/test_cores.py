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
from engine.kernels.cpu.cores import Cores, share_of_time, usable_cpus

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


def test_a_kernel_costs_less_than_a_microsecond(cores: Cores) -> None:
    buffers = [memory.zeros(N, dtypes.float32) for _ in range(2)]
    launches = cores.launches()
    for _ in range(100):
        launches.add(shifted, *buffers)
        launches.add(shifted, *reversed(buffers))
    walk, best = launches.captured(), 1.0
    for _ in range(200):
        started = time.perf_counter()
        walk()
        best = min(best, time.perf_counter() - started)
    if len(usable_cpus()) < cores.count:
        pytest.skip("there are fewer CPUs than threads")
    assert best / 200 < 1e-6


def test_idle_threads_sleep(cores: Cores) -> None:
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.005


def test_it_keeps_to_the_cpus_it_may_use() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = f"""
import os
os.sched_setaffinity(0, {{{cpu}}})
from engine.kernels.cpu.cores import usable_cpus
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
