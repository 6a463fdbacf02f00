"""Counters of a Jetson, from the files of NVIDIA's kernel for Tegra (nvgpu, bpmp, actmon, ina3221)."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from engine.devices.system_files import read_text
from engine.measure.temperatures import hottest, thermal_zones
from engine.protocol.events import Counter

_GPU_NODES = ("gpu", "ga10b", "gv11b", "gp10b", "gm20b")  # device tree names of Tegra's GPUs
_EMC = "sys/kernel/debug/bpmp/debug/clk/emc"  # the external memory controller
_EMC_ACTIVITY = ("sys/kernel/debug/cactmon/mc_all", "sys/kernel/actmon_avg_activity/mc_all")
_NO_EMC = "debugfs shows no EMC (it is for root only)"
_ALERT = "-throttle-alert"  # how the names of these cooling devices end
_POWER_MODE_TIMEOUT_S = 2.0


class JetsonCounters:
    """GPU load and clock, memory clock and activity, the highest temperature, power, and power mode."""

    def __init__(self, root: Path) -> None:
        self._root = root
        devices = (root / "sys/class/devfreq").glob("*")
        self._gpu = next((d for d in devices if read_text(d / "device/of_node/name") in _GPU_NODES), None)
        self._mode: Counter | None = None

    def read(self) -> Iterator[Counter]:
        gpu = self._gpu or self._root / "none"
        no_gpu = "no GPU is listed in /sys/class/devfreq"
        yield _counter("GPU load", gpu / "device/load", "%", 10, absent=no_gpu)
        yield _counter("GPU clock", gpu / "cur_freq", "MHz", 1e6, maximum=gpu / "max_freq", absent=no_gpu)
        least, most = (read_text(gpu / name) for name in ("min_freq", "max_freq"))
        if least and most:  # jetson_clocks holds the clock at its maximum
            yield Counter(name="jetson_clocks", text="on" if least == most else "off")
        emc = self._root / _EMC
        yield _counter("EMC clock", emc / "rate", "MHz", 1e6, maximum=emc / "max_rate", absent=_NO_EMC)
        yield self._emc_activity(emc)
        zones = thermal_zones(self._root)
        yield hottest(zones) if zones else Counter(name="temperature", absent="no zone can be read")
        yield self._power()
        yield from self._throttled()
        if self._mode is None:
            self._mode = _power_mode()
        yield self._mode

    def _emc_activity(self, emc: Path) -> Counter:
        """The memory controller's busy cycles, in kHz, as a share of its clock."""
        for path in (self._root / name for name in _EMC_ACTIVITY):
            busy_khz = _counter("EMC activity", path, "%", 1)
            clock_khz = _counter("", emc / "rate", "", 1e3)
            if busy_khz.value is not None and clock_khz.value:
                percent = min(100 * busy_khz.value / clock_khz.value, 100.0)
                return Counter(name="EMC activity", value=percent, unit="%", maximum=100)
            if busy_khz.absent.startswith("no permission"):
                return busy_khz
        return Counter(name="EMC activity", absent=_NO_EMC)

    def _throttled(self) -> Iterator[Counter]:
        """Which of the alerts that slow clocks down are on: cooling devices of Linux' thermal framework."""
        devices = [*(self._root / "sys/class/thermal").glob("cooling_device*")]
        alerts = {d: kind for d in devices if (kind := read_text(d / "type")).endswith(_ALERT)}
        if alerts:
            on = tuple(
                kind for d, kind in sorted(alerts.items()) if read_text(d / "cur_state") not in ("", "0")
            )
            yield Counter(name="throttled", text=", ".join(on) or "no", parts=on)

    def _power(self) -> Counter:
        """The power of all rails of the ina3221 sensors: the rail VDD_IN is the whole board; without it, their sum."""
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


def _counter(
    name: str, path: Path, unit: str, scale: float, *, maximum: Path | None = None, absent: str = ""
) -> Counter:
    """The number in a file, divided by `scale`. `absent`: the reason to show if there is no such file."""
    try:
        value = float(path.read_text().split()[0]) / scale
    except PermissionError:
        return Counter(name=name, absent=f"no permission for /{'/'.join(path.parts[-3:])}")
    except (OSError, ValueError, IndexError):
        return Counter(name=name, absent=absent or "this machine does not tell")
    limit = None
    if maximum is not None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            limit = float(maximum.read_text().split()[0]) / scale
    return Counter(name=name, value=value, unit=unit, maximum=limit)


def _power_mode() -> Counter:
    try:
        run = subprocess.run(
            ["nvpmodel", "-q"], capture_output=True, text=True, timeout=_POWER_MODE_TIMEOUT_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return Counter(name="power mode", absent="nvpmodel does not answer")
    line = next((line for line in run.stdout.splitlines() if "Power Mode" in line), "")
    return Counter(name="power mode", text=line.partition(":")[2].strip() or "unknown")
