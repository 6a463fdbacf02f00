"""How far a download is, and how fast it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

REPORT_S = 0.1
RATE_WINDOW_S = 5.0
LEAST_WINDOW_S = 0.5


class Cancelled(Exception):
    """The user has had enough of a download. What arrived of it is kept."""


@dataclass(frozen=True)
class Progress:
    """How far a download is. `total_bytes` 0: the server does not say. `bytes_per_s` None: not known yet.
    `note` is what it does instead of receiving bytes, or what it waits for."""

    file: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float | None = None
    note: str = ""

    @property
    def seconds_left(self) -> float | None:
        if not self.bytes_per_s or not self.total_bytes:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s


class Meter:
    """The progress of all files of a model together, told to `report` ten times a second. Each time is a
    chance to stop: these methods raise Cancelled when `cancelled` says so."""

    def __init__(
        self, name: str, total_bytes: int, report: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> None:
        self.name, self.total_bytes = name, total_bytes
        self._report, self._cancelled = report, cancelled
        self._before = 0  # bytes of the files that are done
        self._shown_at = 0.0
        self._past: deque[tuple[float, int]] = deque()

    def show(self, have: int, note: str = "") -> None:
        """`have` bytes of the current file are here."""
        self._stop_if_cancelled()
        now = time.monotonic()
        if now - self._shown_at < REPORT_S:
            return
        self._shown_at = now
        done = self._before + have
        if note or (self._past and done < self._past[-1][1]):
            self._past.clear()
        self._past.append((now, done))
        while self._past[0][0] < now - RATE_WINDOW_S:
            self._past.popleft()
        since, first = self._past[0]
        rate = (done - first) / (now - since) if now - since > LEAST_WINDOW_S else None
        self._report(Progress(self.name, done, self.total_bytes, rate, note))

    def file_is_done(self, n_bytes: int) -> None:
        self._before += n_bytes
        self._report(Progress(self.name, self._before, self.total_bytes or self._before))

    def wait(self, seconds: float, have: int, note: str) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.show(have, note)
            time.sleep(min(left, REPORT_S))

    def _stop_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled
