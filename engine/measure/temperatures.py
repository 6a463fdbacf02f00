"""Temperatures from Linux' thermal zones and hardware monitors."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.devices.system_files import read_text
from engine.protocol.events import Counter

_UNPOWERED_C = -200  # a sensor without power reports -256 °C


def thermal_zones(root: Path) -> dict[str, float]:
    """°C by thermal zone, without zones that cannot be read, which are switched off."""
    return dict(_read(sorted((root / "sys/class/thermal").glob("thermal_zone*/temp")), "type"))


def hardware_monitors(root: Path) -> dict[str, float]:
    """°C by hardware monitor, from its first sensor."""
    return dict(_read(sorted((root / "sys/class/hwmon").glob("hwmon*/temp1_input")), "name"))


def _read(paths: list[Path], name_file: str) -> Iterator[tuple[str, float]]:
    """(name, °C) of the sensors whose files, in thousandths of a degree, are `paths`."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            yield read_text(path.with_name(name_file)), int(path.read_text()) / 1e3


def hottest(zones: dict[str, float]) -> Counter:
    """The highest temperature, with all temperatures as its parts."""
    powered = {name: t for name, t in zones.items() if t > _UNPOWERED_C}
    parts = tuple(f"{name.removesuffix('-thermal')} {t:.0f} °C" for name, t in powered.items())
    return Counter(name="temperature", value=max(powered.values(), default=None), unit="°C", parts=parts)
