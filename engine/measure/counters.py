"""What the machine's own counters say, for the dashboard: clocks, load, temperature, power, memory activity.

A figure that cannot be had is there all the same and says why: it is never 0. On Jetson they come from sysfs
and debugfs, on other NVIDIA GPUs from NVML (the package nvidia-ml-py), for the CPU from Linux' files. They
are sought below `root`, so that a test can stand in for a machine. Reading takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.devices.system_files import meminfo, read_text
from engine.events import Counter

_GPU_NODES = ("gpu", "ga10b", "gv11b", "gp10b", "gm20b")  # device tree names of Tegra's GPUs
_EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
_EMC_ACTIVITY = ("sys/kernel/debug/cactmon/mc_all", "sys/kernel/actmon_avg_activity/mc_all")
_MODE_TIMEOUT_S = 2.0


class Source(Protocol):
    def read(self) -> Iterator[Counter]: ...


class Counters:
    """All sources of a machine. Not thread-safe; meant to be read at most once a second."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        own: int | None = None,
        nvml: str = "pynvml",
    ) -> None:
        """`own` is the id of the process (None: this one) whose load, with that of all that it started, is not that
        of others."""
        self._sources: list[Source] = [Cpu(root, os.getpid() if own is None else own)]
        if is_jetson(root):
            self._sources.insert(0, Jetson(root))
        elif (root / "dev/nvidiactl").exists():
            self._sources.insert(0, Nvml(nvml))

    def read(self) -> tuple[Counter, ...]:
        return tuple(counter for source in self._sources for counter in source.read())


def is_jetson(root: Path = Path("/")) -> bool:
    return (root / "etc/nv_tegra_release").exists()


# --- files ---------------------------------------------------------------------------------------------


def _counter(
    name: str, path: Path, unit: str, scale: float, *, maximum: Path | None = None, missing: str = ""
) -> Counter:
    """The number in a file, divided by `scale`; `missing` says why there may be no such file."""
    try:
        value = float(path.read_text().split()[0]) / scale
    except PermissionError:
        return Counter(name=name, absent=f"no permission for /{'/'.join(path.parts[-3:])}")
    except (OSError, ValueError, IndexError):
        return Counter(name=name, absent=missing or "this machine does not tell")
    limit = None
    if maximum is not None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            limit = float(maximum.read_text().split()[0]) / scale
    return Counter(name=name, value=value, unit=unit, maximum=limit)


# --- the CPU -------------------------------------------------------------------------------------------


class _Process(NamedTuple):
    """Of a process, in ticks: what it used, and what those of its children used that ended and that it waited for.
    (proc(5), stat: after the name, which may hold spaces, come state, parent, …; utime and stime are the 14th and 15th
    field, cutime and cstime the 16th and 17th.)"""

    parent: int
    used: int
    waited: int


def _ticks_since(before: Mapping[int, _Process], now: Mapping[int, _Process]) -> int:
    """What a family used since. Of one that has ended its parent tells, if it waited for it, all that it ever used:
    what was counted of it before is kept under its nearest ancestor that is there."""
    told = dict.fromkeys(now, 0)
    for pid, process in before.items():
        if pid not in now:
            parent = process.parent
            while parent not in now and parent in before:
                parent = before[parent].parent
            told[parent] = told.get(parent, 0) + process.used + process.waited
    new, ticks = _Process(0, 0, 0), 0
    for pid, process in now.items():
        was = before.get(pid, new)
        ticks += max(0, process.used - was.used) + max(0, process.waited - was.waited - told[pid])
    return ticks


class Cpu:
    """Load since the last reading, all of it and that of other programs; mean frequency, hottest zone, memory
    in use."""

    def __init__(self, root: Path, own: int) -> None:
        self._root, self._own = root, own
        self._before, self._own_before = self._ticks(), self._family()

    def read(self) -> Iterator[Counter]:
        now, own = self._ticks(), self._family()
        busy, total = (a - b for a, b in zip(now, self._before, strict=True))
        if total > 0:
            ours = _ticks_since(self._own_before, own)
            self._before, self._own_before = now, own
            yield Counter(name="CPU load", value=100 * busy / total, unit="%", maximum=100)
            yield Counter(name="other load", value=100 * max(0, busy - ours) / total, unit="%", maximum=100)
        else:
            yield Counter(name="CPU load", absent="not yet known" if any(now) else "there is no /proc/stat")
        yield self._frequency()
        yield self._memory()
        if not is_jetson(self._root):
            yield self._temperature()

    def _ticks(self) -> tuple[int, int]:
        """Ticks of all cores so far: not idle, and all (proc(5): user nice system idle iowait irq …)."""
        fields = read_text(self._root / "proc/stat").partition("\n")[0].split()[1:9]
        ticks = [int(field) for field in fields]
        return (sum(ticks) - sum(ticks[3:5]), sum(ticks)) if len(ticks) >= 5 else (0, 0)

    def _family(self) -> dict[int, _Process]:
        """Our process and all that it started, however far down, by process id."""
        found: dict[int, _Process] = {}
        children: dict[int, list[int]] = {}
        for process in (self._root / "proc").glob("[0-9]*"):
            fields = read_text(process / "stat").rpartition(")")[2].split()
            if len(fields) > 14:
                pid, parent = int(process.name), int(fields[1])
                children.setdefault(parent, []).append(pid)
                used, waited = (sum(map(int, fields[at : at + 2])) for at in (11, 13))
                found[pid] = _Process(parent, used, waited)
        family, todo = {}, [self._own]
        while todo:
            pid = todo.pop()
            if pid in found:
                family[pid] = found[pid]
            todo += children.get(pid, ())
        return family

    def _frequency(self) -> Counter:
        cores = self._root / "sys/devices/system/cpu"
        mhz = [
            float(t) / 1e3 for p in cores.glob("cpu[0-9]*/cpufreq/scaling_cur_freq") if (t := read_text(p))
        ]
        maxima = [
            float(t) / 1e3 for p in cores.glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq") if (t := read_text(p))
        ]
        if not mhz:
            lines = read_text(self._root / "proc/cpuinfo").splitlines()
            mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        if not mhz:
            return Counter(name="CPU clock", absent="this machine does not tell")
        return Counter(
            name="CPU clock", value=sum(mhz) / len(mhz), unit="MHz", maximum=max(maxima, default=None)
        )

    def _memory(self) -> Counter:
        memory = meminfo(self._root)
        if not {"MemTotal", "MemAvailable"} <= memory.keys():
            return Counter(name="memory", absent="there is no /proc/meminfo")
        total, free = memory["MemTotal"], memory["MemAvailable"]
        return Counter(name="memory", value=(total - free) / 1e9, unit="GB", maximum=total / 1e9)

    def _temperature(self) -> Counter:
        zones = dict(_zones(self._root)) or dict(_sensors(self._root))
        if not zones:
            return Counter(name="temperature", absent="there are no sensors (a virtual machine?)")
        return _hottest(zones)


def _zones(root: Path) -> Iterator[tuple[str, float]]:
    """Degrees Celsius by thermal zone; zones that cannot be read are switched off."""
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        with contextlib.suppress(OSError, ValueError):
            yield read_text(zone / "type"), int((zone / "temp").read_text()) / 1e3


def _sensors(root: Path) -> Iterator[tuple[str, float]]:
    for path in sorted((root / "sys/class/hwmon").glob("hwmon*/temp1_input")):
        with contextlib.suppress(OSError, ValueError):
            yield read_text(path.with_name("name")), int(path.read_text()) / 1e3


def _hottest(zones: dict[str, float]) -> Counter:
    warm = {name: t for name, t in zones.items() if t > -200}  # -256 °C stands for a sensor without power
    parts = tuple(f"{name.removesuffix('-thermal')} {t:.0f} °C" for name, t in warm.items())
    return Counter(name="temperature", value=max(warm.values(), default=None), unit="°C", parts=parts)


# --- Jetson --------------------------------------------------------------------------------------------


class Jetson:
    """Where the figures come from: NVIDIA's kernel for Tegra (nvgpu, bpmp, actmon, ina3221)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        devices = (root / "sys/class/devfreq").glob("*")
        self._gpu = next((d for d in devices if read_text(d / "device/of_node/name") in _GPU_NODES), None)
        self._mode: Counter | None = None

    def read(self) -> Iterator[Counter]:
        gpu = self._gpu or self._root / "none"
        no_gpu = "no GPU is listed in /sys/class/devfreq"
        yield _counter("GPU load", gpu / "device/load", "%", 10, missing=no_gpu)
        yield _counter("GPU clock", gpu / "cur_freq", "MHz", 1e6, maximum=gpu / "max_freq", missing=no_gpu)
        emc, no_emc = self._root / _EMC, "debugfs shows no EMC (it is for root only)"
        yield _counter("EMC clock", emc / "rate", "MHz", 1e6, maximum=emc / "max_rate", missing=no_emc)
        yield self._emc_activity(emc)
        zones = dict(_zones(self._root))
        yield _hottest(zones) if zones else Counter(name="temperature", absent="no zone can be read")
        yield self._power()
        if self._mode is None:
            self._mode = self._power_mode()
        yield self._mode

    def _emc_activity(self, emc: Path) -> Counter:
        """Busy cycles of the memory controller in kHz, against the clock it runs at."""
        for path in (self._root / name for name in _EMC_ACTIVITY):
            found = _counter("EMC activity", path, "%", 1)
            rate = _counter("", emc / "rate", "", 1e3)
            if found.value is not None and rate.value:
                share = 100 * found.value / rate.value
                return Counter(name="EMC activity", value=min(share, 100.0), unit="%", maximum=100)
            if found.absent.startswith("no permission"):
                return found
        return Counter(name="EMC activity", absent="debugfs shows no EMC (it is for root only)")

    def _power(self) -> Counter:
        """All rails of the ina3221 sensors: the one called VDD_IN is the whole board, else their sum."""
        watts: dict[str, float] = {}
        for label in sorted(self._root.glob("sys/bus/i2c/devices/*/hwmon/hwmon*/in*_label")):
            n = label.name.removeprefix("in").removesuffix("_label")
            with contextlib.suppress(OSError, ValueError):
                volts = int((label.parent / f"in{n}_input").read_text()) / 1e3
                amperes = int((label.parent / f"curr{n}_input").read_text()) / 1e3
                watts[read_text(label)] = volts * amperes
        if not watts:
            return Counter(name="power", absent="no ina3221 sensor can be read")
        parts = tuple(f"{name} {value:.1f} W" for name, value in watts.items())
        return Counter(name="power", value=watts.get("VDD_IN", sum(watts.values())), unit="W", parts=parts)

    def _power_mode(self) -> Counter:
        try:
            run = subprocess.run(
                ["nvpmodel", "-q"], capture_output=True, text=True, timeout=_MODE_TIMEOUT_S, check=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return Counter(name="power mode", absent="nvpmodel does not answer")
        line = next((line for line in run.stdout.splitlines() if "Power Mode" in line), "")
        return Counter(name="power mode", text=line.partition(":")[2].strip() or "unknown")


# --- NVML ----------------------------------------------------------------------------------------------

# What holds a GPU's clock down, of nvmlClocksEventReasons in nvml.h; others are idleness and users' limits.
_THROTTLES = {
    0x04: "power limit", 0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)",
    0x80: "power brake",
}  # fmt: skip


class Nvml:
    """The first NVIDIA GPU, by NVML."""

    def __init__(self, module: str) -> None:
        self._absent = ""
        try:
            self._nvml: Any = importlib.import_module(module)
            self._nvml.nvmlInit()
            self._gpu = self._nvml.nvmlDeviceGetHandleByIndex(0)
        except ImportError:
            self._absent = "the package nvidia-ml-py is not installed"
        except Exception as error:  # NVMLError, of the module that may not be there
            self._absent = f"NVML: {error}"

    def read(self) -> Iterator[Counter]:
        if self._absent:
            yield Counter(name="GPU", absent=self._absent)
            return
        n, gpu = self._nvml, self._gpu
        yield self._ask("GPU load", "%", lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu, lambda: 100)
        yield self._ask(
            "memory activity", "%", lambda: n.nvmlDeviceGetUtilizationRates(gpu).memory, lambda: 100
        )
        for name, clock in (("GPU clock", n.NVML_CLOCK_SM), ("memory clock", n.NVML_CLOCK_MEM)):
            now, maximum = (
                partial(f, gpu, clock) for f in (n.nvmlDeviceGetClockInfo, n.nvmlDeviceGetMaxClockInfo)
            )
            yield self._ask(name, "MHz", now, maximum)
        yield self._ask("temperature", "°C", lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU))
        yield self._ask(
            "power",
            "W",
            lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            lambda: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
        )
        yield self._ask(
            "GPU memory",
            "GB",
            lambda: n.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
            lambda: n.nvmlDeviceGetMemoryInfo(gpu).total / 1e9,
        )
        yield self._throttles()

    def _ask(
        self, name: str, unit: str, value: Callable[[], float], maximum: Callable[[], float] = lambda: 0
    ) -> Counter:
        try:
            figure = float(value())
        except Exception as error:
            return Counter(name=name, absent=f"NVML: {error}")
        limit = 0.0
        with contextlib.suppress(Exception):
            limit = float(maximum())
        return Counter(name=name, value=figure, unit=unit, maximum=limit or None)

    def _throttles(self) -> Counter:
        try:
            reasons = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu))
        except Exception as error:
            return Counter(name="throttled", absent=f"NVML: {error}")
        found = tuple(dict.fromkeys(text for bit, text in _THROTTLES.items() if reasons & bit))
        return Counter(name="throttled", text=", ".join(found) or "no", parts=found)
