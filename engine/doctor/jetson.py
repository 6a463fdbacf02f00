"""What a Jetson has: its L4T release, the device nodes of its GPU drivers and who may use them, power mode, clocks."""

import ctypes.util
import grp
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.devices.nvidia import is_jetson
from engine.devices.system_files import read_text
from engine.doctor import Finding, bad, fair, good, note
from engine.doctor.host import as_text
from engine.measure.jetson_counters import JetsonCounters
from engine.protocol.events import Counter
from engine.tegra.abi import CTRL, L4T, NVMAP

JETPACKS = {36: "JetPack 6", 38: "JetPack 7.0 or 7.1", 39: "JetPack 7.2"}
"""The name of a release of L4T, by its first number."""
_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")
_MODE_ADVICE = "For full speed: sudo nvpmodel -m 0 (some modes need a restart), then sudo jetson_clocks"

Access = Callable[[Path], bool]


def may_use(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def is_found(root: Path) -> bool:
    """Whether the machine is a Jetson. A container on one may lack its release file, but have its device nodes."""
    return is_jetson(root) or (root / CTRL.lstrip("/")).exists()


def toolkit(root: Path) -> str:
    """The package of CUDA's compiler and headers for the release."""
    release = _RELEASE.search(read_text(root / "etc/nv_tegra_release"))
    return "cuda-toolkit-13-2" if release and int(release[1]) >= 39 else "cuda-toolkit-12-6"


def examine(
    root: Path = Path("/"),
    *,
    access: Access = may_use,
    has_libatomic: Callable[[], bool] = lambda: bool(ctypes.util.find_library("atomic")),
) -> list[Finding]:
    """No findings on a machine that is not a Jetson."""
    if not is_found(root):
        return []
    return [
        note("board", read_text(root / "proc/device-tree/model") or "its name is not known"),
        _release(root),
        *(_node(root, node, access) for node in (NVMAP, CTRL)),
        good("libatomic", "installed")
        if has_libatomic()
        else bad("libatomic", "not installed, and NV needs it", "sudo apt install libatomic1"),
        *_counters(root),
    ]


def _release(root: Path) -> Finding:
    release = _RELEASE.search(read_text(root / "etc/nv_tegra_release"))
    if release is None:
        advice = "In a container, mount /etc/nv_tegra_release. Without it, see below whether NV works."
        return note("L4T", "the release is not known: there is no /etc/nv_tegra_release", advice)
    major, name = int(release[1]), f"r{release[1]}.{release[2]}"
    known = f"{name}{f' ({JETPACKS[major]})' if major in JETPACKS else ''}"
    if name.startswith(L4T):
        return good("L4T", f"{known}; the NV backend is written for {L4T}")
    if major >= 36:
        advice = (
            "CUDA needs no such thing. NV asks the drivers whether their interface is the same: see below. If not, "
            "take the CUDA backend and send the report."
        )
        return fair("L4T", f"{known}; the NV backend is written for {L4T}, and has met no other", advice)
    advice = "Take the CUDA backend, or install JetPack 6 or 7.2."
    return bad("L4T", f"{name} is older than JetPack 6; the NV backend needs {L4T}", advice)


def _node(root: Path, node: str, access: Access) -> Finding:
    path = root / node.lstrip("/")
    if not path.exists():
        advice = f"NV needs it. Start a container with --device {node}; on a bare machine, install JetPack 6."
        return bad(node, "missing", advice)
    if access(path):
        return good(node, "can be read and written")
    owner = _group(path.stat().st_gid)
    groups = ",".join(dict.fromkeys((owner, "video", "render")))
    advice = f"Run sudo usermod -aG {groups} $USER, then log in again."
    return bad(node, f"no permission: it belongs to the group {owner}", advice)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _counters(root: Path) -> Iterator[Finding]:
    counters = {counter.name: counter for counter in JetsonCounters(root).read()}
    mode = counters["power mode"]
    if mode.absent:
        yield note("power mode", mode.absent)
    elif mode.text.upper().startswith("MAXN"):
        yield good("power mode", mode.text)
    else:
        yield fair("power mode", f"{mode.text}, which limits clocks and may turn cores off", _MODE_ADVICE)
    yield _clock(counters["GPU clock"])
    for name in ("EMC clock", "temperature", "power"):
        yield note(name, as_text(counters[name]))


def _clock(clock: Counter) -> Finding:
    """jetson_clocks keeps it at its maximum; without, it falls when the GPU has little to do."""
    if clock.value is None:
        return note("GPU clock", clock.absent)
    if clock.maximum and clock.value < 0.99 * clock.maximum:
        advice = "It rises under load. For benchmarks: sudo jetson_clocks"
        return note("GPU clock", f"{clock.value:.0f} of {clock.maximum:.0f} MHz now", advice)
    return good("GPU clock", f"{clock.value:.0f} MHz")
