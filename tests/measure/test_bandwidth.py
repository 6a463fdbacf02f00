"""The bandwidth that figures are held against."""

import pytest

from engine.measure import bandwidth
from engine.measure.bandwidth import copy_gbps


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(bandwidth, "HOST_BYTES", 32 << 20)
    monkeypatch.setattr(bandwidth, "DEVICE_BYTES", 8 << 20)


def test_reading_by_the_cores_of_this_machine():
    assert 0.5 < copy_gbps("CPU") < 5000


def test_a_copy_by_a_kernel_writes_what_it_read(monkeypatch):
    assert 0.1 < bandwidth._kernel_copy_gbps("CPU") < 5000


def test_bytes_count_when_read_and_when_written(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
    assert bandwidth._best_gbps(3_000_000_000, lambda: None) == 6
