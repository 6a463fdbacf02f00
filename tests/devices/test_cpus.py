"""The CPUs that a process computes on."""

import os
import subprocess
import sys

import pytest

from engine.devices.cpus import cpu_quota


def test_only_allowed_cpus_are_used() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = f"""
import os
os.sched_setaffinity(0, {{{cpu}}})
from engine.devices.cpus import worker_cpus
print(worker_cpus())
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
def test_it_keeps_to_its_cpu_quota(tmp_path, files: dict[str, str], wanted: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_quota(tmp_path) == wanted
