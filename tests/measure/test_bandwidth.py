"""The bandwidth that figures are held against."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.measure import bandwidth
from engine.measure.bandwidth import copy_gbps
from engine.targets.cpu.kernels import read_bandwidth
from tests.paths import ROOT
from tests.thorough import thorough


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(bandwidth, "HOST_BYTES", 32 << 20)
    monkeypatch.setattr(bandwidth, "DEVICE_BYTES", 8 << 20)


def test_a_cpu_reads_all_of_it(monkeypatch):
    """The kernel checks that it has read a whole section, here in a second by its clock: an eighth of the memory."""
    clock = itertools.count()
    monkeypatch.setattr(read_bandwidth, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    assert copy_gbps("CPU") == (32 << 20) / 8 / 1e9


COPY = """
from types import SimpleNamespace
import numpy as np
from tinygrad import Tensor
from engine.targets.nvidia.kernels.copy_kernel import BLOCK_FLOATS, copy_kernel
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.measure import bandwidth

source = Tensor(np.arange(2 * BLOCK_FLOATS, dtype=np.float32)).realize()
target = Tensor(np.zeros(2 * BLOCK_FLOATS, np.float32)).realize()
sequence = KernelSequence()
sequence.add(copy_kernel(2 * BLOCK_FLOATS), target=target, source=source)
sequence.capture()()
assert (target.numpy() == source.numpy()).all()
bandwidth.DEVICE_BYTES, bandwidth.COPIES, bandwidth.ROUNDS = 4 * BLOCK_FLOATS, 1, 1
clock = iter([0.0, 2.0])
bandwidth.time = SimpleNamespace(perf_counter=lambda: next(clock))
assert bandwidth._kernel_copy_gbps("PYTHON") == 2 * 4 * BLOCK_FLOATS / 2.0 / 1e9
"""


@thorough
def test_a_gpu_copies_all_of_it():
    root, env = ROOT, {**os.environ, "DEV": "PYTHON::sm_90"}
    subprocess.run([sys.executable, "-c", COPY], cwd=root, env=env, check=True)


def test_bytes_count_when_read_and_when_written(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
    assert bandwidth._best_gbps(3_000_000_000, lambda: None) == 6
