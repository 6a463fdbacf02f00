"""What a process does while it starts: named spans of time, which may overlap."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.protocol.events import Span


class Timeline:
    """Spans since the process began."""

    def __init__(self) -> None:
        self._began_s = _process_start_s()
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def until_now(self, name: str) -> None:
        """Adds the span from the start of the process to now."""
        self._add(name, self._began_s)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the span that the body takes."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, started_s)

    @property
    def age_ms(self) -> float:
        """Time since the process began."""
        return (time.perf_counter() - self._began_s) * 1e3

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans so far, in the order of their starts."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.start_ms))

    def _add(self, name: str, started_s: float) -> None:
        start_ms, took_ms = (started_s - self._began_s) * 1e3, (time.perf_counter() - started_s) * 1e3
        with self._lock:
            self._spans.append(Span(name=name, start_ms=start_ms, took_ms=took_ms))


def _process_start_s() -> float:
    """When this process began, by the clock of time.perf_counter; now, where the system does not tell. proc(5): field
    22 of /proc/self/stat is in clock ticks since boot, and the name in field 2 may hold spaces."""
    now_s = time.perf_counter()
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        ticks = int(stat.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return now_s - max(0.0, age_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return now_s


timeline = Timeline()
"""The timeline of this process."""
