"""What a Jetson has: its release, the nodes of its GPU's drivers and who may use them, its power mode and clocks."""

from __future__ import annotations

import ctypes.util
import grp
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.doctor import Finding, bad, fair, good, note
from engine.doctor.host import as_text, read
from engine.events import Counter
from engine.measure.counters import Jetson, is_jetson
from engine.tegra.abi import CTRL, L4T, NVMAP

_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")
_MODE_ADVICE = "For full speed: sudo nvpmodel -m 0 (some modes need a restart), then sudo jetson_clocks"

Access = Callable[[Path], bool]


def may_use(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def examine(
    root: Path = Path("/"),
    *,
    access: Access = may_use,
    has_libatomic: Callable[[], bool] = lambda: bool(ctypes.util.find_library("atomic")),
) -> list[Finding]:
    """Nothing on another machine."""
    if not (is_jetson(root) or (root / CTRL.lstrip("/")).exists()):
        return []
    board = read(root / "proc/device-tree/model").strip()
    return [
        note("board", board or "it does not tell its name"),
        _release(root),
        *(_node(root, node, access) for node in (NVMAP, CTRL)),
        good("libatomic", "there is one")
        if has_libatomic()
        else bad("libatomic", "there is none, and NV needs it", "sudo apt install libatomic1"),
        *_counters(root),
    ]


def _release(root: Path) -> Finding:
    found = _RELEASE.search(read(root / "etc/nv_tegra_release"))
    if found is None:
        advice = (
            "In a container, mount /etc/nv_tegra_release; else this is no L4T, and only a trial can tell."
        )
        return note("L4T", "the release is not known (/etc/nv_tegra_release)", advice)
    major, name = int(found[1]), f"r{found[1]}.{found[2]}"
    if name.startswith(L4T):
        return good("L4T", f"{name}, as NV's driver interface was written for ({L4T})")
    if major >= 36:
        advice = (
            "Whether it speaks the same is seen below. If not, take the CUDA backend, and send the report."
        )
        return fair("L4T", f"{name}; NV's driver interface was written for {L4T}", advice)
    advice = "Take the CUDA backend, or install JetPack 6."
    return bad("L4T", f"{name} is older than JetPack 6: NV knows {L4T} only", advice)


def _node(root: Path, node: str, access: Access) -> Finding:
    path = root / node.lstrip("/")
    if not path.exists():
        advice = f"NV needs it: in a container, start that with --device {node}; else install JetPack 6."
        return bad(node, "there is none", advice)
    if access(path):
        return good(node, "may be used")
    owner = _group(path.stat().st_gid)
    advice = (
        f"sudo usermod -aG {','.join(dict.fromkeys((owner, 'video', 'render')))} $USER, then log in again."
    )
    return bad(node, f"no permission: it belongs to the group {owner}", advice)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _counters(root: Path) -> Iterator[Finding]:
    found = {counter.name: counter for counter in Jetson(root).read()}
    mode = found["power mode"]
    if mode.absent:
        yield note("power mode", mode.absent)
    elif mode.text.upper().startswith("MAXN"):
        yield good("power mode", mode.text)
    else:
        yield fair("power mode", f"{mode.text}, which limits clocks and may switch cores off", _MODE_ADVICE)
    yield _clock(root, found["GPU clock"])
    for name in ("EMC clock", "temperature", "power"):
        yield note(name, as_text(found[name]))


def _clock(root: Path, clock: Counter) -> Finding:
    """Held at its highest by jetson_clocks, or free to fall when little is to be done."""
    if clock.value is None:
        return note("GPU clock", clock.absent)
    if clock.most and clock.value < 0.99 * clock.most:
        advice = "It rises under load. For benchmarks: sudo jetson_clocks"
        return note("GPU clock", f"{clock.value:.0f} of {clock.most:.0f} MHz now", advice)
    return good("GPU clock", f"{clock.value:.0f} MHz")
