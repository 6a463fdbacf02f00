"""The roofline of each device: the best copy bandwidth that was ever measured on it, kept from one run to the next.

Other programs only make a measurement less, so the best one is nearest to the truth.
"""

import contextlib
import platform
from pathlib import Path

import msgspec
import platformdirs

from engine.protocol.events import Ready
from engine.system.whole_file import read_file, write_whole


def device_key(ready: Ready) -> str:
    return f"{ready.backend} {ready.device_name}"


def best_gbps(device: str) -> float:
    """The best bandwidth so far, in 10^9 bytes a second; 0: nothing was measured yet on this machine."""
    return _read().get(platform.node(), {}).get(device, 0.0)


def keep_best(device: str, gbps: float) -> float:
    """Stores a measurement if it is the best one, and returns the best. A state folder that cannot be written is
    ignored."""
    best = best_gbps(device)
    if gbps <= best:
        return best
    with contextlib.suppress(OSError, UnicodeEncodeError):
        machines = _read()
        machines.setdefault(platform.node(), {})[device] = gbps
        write_whole(_path(), msgspec.json.encode(machines))
    return gbps


def _path() -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / "bandwidth.json"


def _read() -> dict[str, dict[str, float]]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_file(_path()), type=dict[str, dict[str, float]])
    return {}
