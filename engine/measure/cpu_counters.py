"""Counters of the CPU and the memory, from /proc and sysfs."""

import os
from collections.abc import Iterator
from pathlib import Path

from engine.devices.nvidia import is_jetson
from engine.devices.system_files import meminfo, read_text
from engine.measure.process_times import family_times, ticks_between
from engine.measure.temperatures import hardware_monitors, hottest, thermal_zones
from engine.protocol.events import Counter


class CpuCounters:
    """The load since the last reading, in total and by other programs; the mean clock; memory in use; except on a
    Jetson, the highest temperature."""

    def __init__(self, root: Path = Path("/"), process_id: int | None = None) -> None:
        """Other programs are all but the process with this id (None: this one) and its descendants."""
        self._root, self._process_id = root, os.getpid() if process_id is None else process_id
        self._ticks, self._family = self._read_ticks(), family_times(root, self._process_id)

    def read(self) -> Iterator[Counter]:
        now, family = self._read_ticks(), family_times(self._root, self._process_id)
        busy, total = (a - b for a, b in zip(now, self._ticks, strict=True))
        if total > 0:
            others = max(0, busy - ticks_between(self._family, family))
            self._ticks, self._family = now, family
            yield Counter(name="CPU load", value=100 * busy / total, unit="%", maximum=100)
            yield Counter(name="other load", value=100 * others / total, unit="%", maximum=100)
        else:
            yield Counter(name="CPU load", absent="not yet known" if any(now) else "there is no /proc/stat")
        yield self._clock()
        memory = meminfo(self._root)
        if {"MemTotal", "MemAvailable"} <= memory.keys():
            used, total = memory["MemTotal"] - memory["MemAvailable"], memory["MemTotal"]
            yield Counter(name="memory", value=used / 1e9, unit="GB", maximum=total / 1e9)
        else:
            yield Counter(name="memory", absent="there is no /proc/meminfo")
        if not is_jetson(self._root):
            zones = thermal_zones(self._root) or hardware_monitors(self._root)
            absent = Counter(name="temperature", absent="there are no sensors (a virtual machine?)")
            yield hottest(zones) if zones else absent

    def _read_ticks(self) -> tuple[int, int]:
        """(busy, all) clock ticks of all CPUs since the start (proc_stat(5): user nice system idle iowait irq …)."""
        fields = read_text(self._root / "proc/stat").partition("\n")[0].split()[1:9]
        ticks = [int(field) for field in fields]
        return (sum(ticks) - sum(ticks[3:5]), sum(ticks)) if len(ticks) >= 5 else (0, 0)

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
