"""The CPUs that this process may use, and how much of their time it gets."""

import functools
import os
from pathlib import Path

from engine.devices.system_files import read_text


def allowed_cpus() -> frozenset[int]:
    """Numbers of the CPUs that this process may run on (taskset, cpusets); all CPUs if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@functools.cache
def worker_cpus() -> list[int]:
    """The CPUs to compute on: one hardware thread of each allowed core, and no more than the quota of CPU time."""
    cores: dict[str, int] = {}
    for cpu in sorted(allowed_cpus()):
        siblings = read_text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.setdefault(siblings or str(cpu), cpu)
    return list(cores.values())[: max(1, int(min(cpu_quota(), len(cores))))]


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """The CPU time that the control group grants, in CPUs (cpu.max of cgroup v2, cpu.cfs_quota_us of v1); infinite
    without a limit."""
    quota_us, period_us = (read_text(cgroup / "cpu.max") or "max 1").split()
    if quota_us == "max":
        quota_us, period_us = (read_text(cgroup / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota_us) / int(period_us) if quota_us.isdecimal() else float("inf")
