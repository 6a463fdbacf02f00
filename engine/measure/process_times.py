"""The CPU time of a process and of all its descendants (proc_pid_stat(5)), in clock ticks."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# Fields of /proc/PID/stat, counted from the state, which follows the name. A name can hold spaces.
_PARENT, _UTIME, _CUTIME, _RSS = 1, 11, 13, 21


class ProcessTimes(NamedTuple):
    """The CPU time of a process: `used` by itself (utime + stime), and `waited_for`, used by children that ended and
    that it waited for (cutime + cstime). `pages` of memory are its own or shared with others."""

    parent: int
    used: int
    waited_for: int
    name: str = ""
    pages: int = 0


def all_times(root: Path) -> dict[int, ProcessTimes]:
    """The times of all processes, by process id."""
    times: dict[int, ProcessTimes] = {}
    folder = root / "proc"
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 (with a Path of each: twice the time)
    for pid in filter(str.isdecimal, names):
        try:
            with open(f"{folder}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                head, _, tail = file.read().decode(errors="replace").rpartition(")")
        except OSError:  # it has ended
            continue
        fields = tail.split()
        if len(fields) > _CUTIME + 1:
            used, waited_for = (sum(map(int, fields[i : i + 2])) for i in (_UTIME, _CUTIME))
            pages = int(fields[_RSS]) if len(fields) > _RSS else 0
            parent, name = int(fields[_PARENT]), head.partition("(")[2]
            times[int(pid)] = ProcessTimes(parent, used, waited_for, name, pages)
    return times


def family_of(process_id: int, times: Mapping[int, ProcessTimes]) -> dict[int, ProcessTimes]:
    """The times of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in times.items():
        children.setdefault(process.parent, []).append(pid)
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
