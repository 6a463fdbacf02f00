"""Counters of the CPU and the memory, from /proc and sysfs."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.devices.nvidia import is_jetson
from engine.devices.system_files import meminfo, read_text
from engine.measure.process_times import ProcessTimes, all_times, family_of, ticks_between
from engine.measure.temperatures import hardware_monitors, hottest, thermal_zones
from engine.protocol.events import Counter

NAMES = 4
"""How many other programs are named at most: those that use the CPUs most, each at least 1 % of them."""


class CpuCounters:
    """The load since the last reading, in total, by other programs and of each core; the mean clock; memory in use, and
    by the engine; except on a Jetson, the highest temperature."""

    def __init__(self, root: Path = Path("/"), process_id: int | None = None) -> None:
        """Other programs are all but the process with this id (None: this one) and its descendants."""
        self._root, self._process_id = root, os.getpid() if process_id is None else process_id
        self._ticks, self._times = self._read_ticks(), all_times(root)

    def read(self) -> Iterator[Counter]:
        now, times = self._read_ticks(), all_times(self._root)
        (busy, total), *cores = (
            ((a - c, b - d) for (a, b), (c, d) in zip(now, self._ticks, strict=False))
            if now and self._ticks
            else [(0, 0)]
        )
        family = family_of(self._process_id, times)
        if total > 0:
            before = family_of(self._process_id, self._times)
            others = max(0, busy - ticks_between(before, family))
            names = _busiest(self._times, times, family, total)
            self._ticks, self._times = now, times
            yield Counter(name="CPU load", value=100 * busy / total, unit="%", maximum=100)
            yield Counter(name="other load", value=100 * others / total, unit="%", maximum=100, parts=names)
            loads = [100 * busy / max(1, total) for busy, total in cores]
            if len(loads) > 1:
                parts = tuple(f"{load:.0f} %" for load in loads)
                yield Counter(name="busiest core", value=max(loads), unit="%", maximum=100, parts=parts)
        else:
            yield Counter(name="CPU load", absent="not yet known" if now else "there is no /proc/stat")
        yield self._clock()
        memory = meminfo(self._root)
        if {"MemTotal", "MemAvailable"} <= memory.keys():
            used, total = memory["MemTotal"] - memory["MemAvailable"], memory["MemTotal"]
            yield Counter(name="memory", value=used / 1e9, unit="GB", maximum=total / 1e9)
        else:
            yield Counter(name="memory", absent="there is no /proc/meminfo")
        engine = [process for pid, process in family.items() if pid != self._process_id]
        if held := sum(process.pages for process in engine) * os.sysconf("SC_PAGE_SIZE"):
            yield Counter(name="engine memory", value=held / 1e9, unit="GB")
        if not is_jetson(self._root):
            zones = thermal_zones(self._root) or hardware_monitors(self._root)
            absent = Counter(name="temperature", absent="there are no sensors (a virtual machine?)")
            yield hottest(zones) if zones else absent

    def _read_ticks(self) -> list[tuple[int, int]]:
        """(busy, all) clock ticks since the start of all CPUs, then of each (proc_stat(5): user nice system idle iowait
        irq …)."""
        lines = [
            line.split() for line in read_text(self._root / "proc/stat").splitlines() if line[:3] == "cpu"
        ]
        counted = ([int(field) for field in fields[1:9]] for fields in lines)
        return [(sum(ticks) - sum(ticks[3:5]), sum(ticks)) for ticks in counted if len(ticks) >= 5]

    def _clock(self) -> Counter:
        current_mhz, max_mhz = (
            [
                float(khz) / 1e3
                for path in (self._root / "sys/devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}")
                if (khz := read_text(path))
            ]
            for name in ("scaling_cur_freq", "cpuinfo_max_freq")
        )
        if not current_mhz:
            lines = read_text(self._root / "proc/cpuinfo").splitlines()
            current_mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        if not current_mhz:
            return Counter(name="CPU clock", absent="this machine does not tell")
        mean_mhz = sum(current_mhz) / len(current_mhz)
        return Counter(name="CPU clock", value=mean_mhz, unit="MHz", maximum=max(max_mhz, default=None))


def _busiest(
    before: Mapping[int, ProcessTimes],
    now: Mapping[int, ProcessTimes],
    family: Mapping[int, ProcessTimes],
    ticks: int,
) -> tuple[str, ...]:
    """The other programs that used most of the CPUs between two readings: "python3 48 %". Of all CPUs, in `ticks`."""
    used: dict[str, int] = {}
    for pid, process in now.items():
        if pid not in family and pid in before:
            used[process.name] = used.get(process.name, 0) + process.used - before[pid].used
    most = sorted(used.items(), key=lambda item: -item[1])[:NAMES]
    return tuple(f"{name} {100 * own / ticks:.0f} %" for name, own in most if 100 * own >= ticks)
