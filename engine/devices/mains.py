"""Whether the machine runs on mains power."""

from pathlib import Path

_SUPPLIES = Path("/sys/class/power_supply")


def is_on_mains(supplies: Path = _SUPPLIES) -> bool:
    """False if a battery of the machine discharges. (One of scope "Device" is a mouse's or a headset's:
    Documentation/ABI/testing/sysfs-class-power of Linux.)"""
    return not any(
        _read(supply / "type") == "Battery"
        and _read(supply / "scope") != "Device"
        and _read(supply / "status") == "Discharging"
        for supply in supplies.glob("*")
    )


def _read(path: Path) -> str:
    """A file's line; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return ""
