"""What the memory of an engine is made of, told from inside: a thread of it writes a line of JSON each time.

    PYTHONPATH=FOLDER with a sitecustomize.py that calls `begin`; `memory_of` and `grown` read what came.

It holds the engine for a tenth of a second each time, while it counts objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENGINE = "engine.protocol.worker"
_MOST_TOLD, _LEAST_GROWTH = 8, 16
_CONTAINERS = (dict, list, set, tuple, bytes, bytearray, frozenset)
SITECUSTOMIZE = "from tools.measure import engine_witness\nengine_witness.begin({path!r}, {every_s})\n"


class _Malloc(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "used",
            "free",
            "keepcost",
        )
    )


def begin(path: str, every_s: float) -> None:
    """Lets a thread write to `path` if this process is an engine's. Called before its own modules are imported."""
    if ENGINE in Path("/proc/self/cmdline").read_text().split("\0"):
        threading.Thread(target=_tell, args=(path, every_s), name="witness", daemon=True).start()


def _tell(path: str, every_s: float) -> None:
    while True:
        time.sleep(every_s)
        with contextlib.suppress(Exception), Path(path).open("a") as file:  # the engine goes on
            file.write(json.dumps(_look()) + "\n")


def _look() -> dict[str, Any]:
    """Numbers by name: MB of malloc, Python's blocks, objects by type, entries of containers by who has them."""
    started = time.perf_counter()
    objects = gc.get_objects()
    types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    entries = Counter[str]()
    for each in objects:
        module = str(type(each).__module__)
        if module.startswith(("engine.", "tinygrad.")):
            for name, value in _attributes(each):
                entries[f"{type(each).__qualname__}.{name}"] += len(value)
        elif type(each).__name__ == "_lru_cache_wrapper":
            entries[f"{each.__module__}.{each.__qualname__}"] += each.cache_info().currsize
    del objects
    for name, loaded in list(sys.modules.items()):
        if name.startswith(("engine.", "tinygrad.")):
            for key, value in list(vars(loaded).items()):
                if isinstance(value, _CONTAINERS):
                    entries[f"{name}.{key}"] += len(value)
    found = {"blocks": sys.getallocatedblocks(), "threads": threading.active_count()}
    if hasattr(libc := ctypes.CDLL(None), "mallinfo2"):
        libc.mallinfo2.restype = _Malloc
        malloc = libc.mallinfo2()
        found |= {
            "malloc_used_mb": malloc.used >> 20,
            "malloc_free_mb": malloc.free >> 20,
            "malloc_mapped_mb": malloc.hblkhd >> 20,
        }
    found["look_ms"] = round((time.perf_counter() - started) * 1e3)
    return found | {"types": types, "entries": entries}


def _attributes(each: object) -> Iterable[tuple[str, Any]]:
    for name, value in list(getattr(each, "__dict__", {}).items()):
        if isinstance(value, _CONTAINERS) or type(value).__name__ == "deque":
            yield name, value


def told(path: Path) -> list[dict[str, Any]]:
    """All that came so far."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    except (OSError, ValueError):
        return []


def grown(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What there is now, and what there is more of than before, the most first."""
    parts = [f"{name} {now[name]}" for name in now if name not in ("types", "entries")]
    for kind in ("types", "entries"):
        more = Counter(now[kind])
        more.subtract(before[kind])
        most = [f"{name} +{n}" for name, n in more.most_common(_MOST_TOLD) if n >= _LEAST_GROWTH]
        parts.append(f"{kind}: {', '.join(most) or 'none more'}")
    return "; ".join(parts)


def memory_of(pid: int) -> dict[str, int]:
    """Resident MB of a process by what is mapped (proc_pid_smaps(5)): the heap, other memory without a file, devices,
    shared memory, files."""
    kib, kind = Counter[str](), "none"
    try:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                kind = _kind(line.split(maxsplit=5)[5] if len(line.split()) > 5 else "")
            elif line.startswith("Rss:"):
                kib[kind] += int(line.split()[1])
    except (OSError, ValueError):
        return {}
    return {name: n >> 10 for name, n in kib.items() if n >> 10}


def _kind(path: str) -> str:
    if not path or path.startswith("[anon"):
        return "anonymous"
    if path == "[heap]":
        return "heap"
    if path.startswith("/dev/nvidia"):
        return "GPU"
    if path.startswith(("/dev/", "/memfd", "/SYSV")):
        return "shared"
    return "stack" if path.startswith("[") else "files"


def engine_of(pids: Iterable[int]) -> int | None:
    """Which of these processes is an engine."""
    for pid in pids:
        try:
            if ENGINE in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return pid
        except OSError:
            continue
    return None
