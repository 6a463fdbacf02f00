"""The CPU time of a process and of all its descendants (proc_pid_stat(5)), in clock ticks."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine.devices.system_files import read_text

# Fields of /proc/PID/stat, counted from the state, which follows the name. A name can hold spaces.
_PARENT, _UTIME, _CUTIME = 1, 11, 13


class ProcessTimes(NamedTuple):
    """The CPU time of a process: `used` by itself (utime + stime), and `waited_for`, used by children that ended and
    that it waited for (cutime + cstime)."""

    parent: int
    used: int
    waited_for: int


def family_times(root: Path, process_id: int) -> dict[int, ProcessTimes]:
    """The times of a process and of all its descendants, by process id."""
    times: dict[int, ProcessTimes] = {}
    children: dict[int, list[int]] = {}
    for process in (root / "proc").glob("[0-9]*"):
        fields = read_text(process / "stat").rpartition(")")[2].split()
        if len(fields) > _CUTIME + 1:
            pid, parent = int(process.name), int(fields[_PARENT])
            children.setdefault(parent, []).append(pid)
            used, waited_for = (sum(map(int, fields[i : i + 2])) for i in (_UTIME, _CUTIME))
            times[pid] = ProcessTimes(parent, used, waited_for)
    family, todo = {}, [process_id]
    while todo:
        pid = todo.pop()
        if pid in times:
            family[pid] = times[pid]
        todo += children.get(pid, ())
    return family


def ticks_between(before: Mapping[int, ProcessTimes], now: Mapping[int, ProcessTimes]) -> int:
    """The ticks that a family used between two readings.

    If a process has ended, and its parent waited for it, the parent's `waited_for` grows by all that the process ever
    used. What the process had used before the first reading is therefore subtracted from its nearest living ancestor.
    """
    counted_before = dict.fromkeys(now, 0)
    for pid, process in before.items():
        if pid not in now:
            ancestor = process.parent
            while ancestor not in now and ancestor in before:
                ancestor = before[ancestor].parent
            counted_before[ancestor] = counted_before.get(ancestor, 0) + process.used + process.waited_for
    started, ticks = ProcessTimes(0, 0, 0), 0
    for pid, process in now.items():
        old = before.get(pid, started)
        ticks += max(0, process.used - old.used)
        ticks += max(0, process.waited_for - old.waited_for - counted_before[pid])
    return ticks
