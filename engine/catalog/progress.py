"""The progress of a download, and its rate."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

REPORT_S = 0.1
RATE_WINDOW_S = 5.0
MIN_RATE_WINDOW_S = 0.5


class Cancelled(Exception):
    """The user cancelled a download. The bytes that arrived are kept."""


@dataclass(frozen=True)
class Progress:
    """The progress of a model's download. `total_bytes` 0: the server does not say. `bytes_per_s` None: not known
    yet. `note`: what the download does at the moment instead of receiving bytes; "" while it receives."""

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
    """Measures all files of a model together and calls `report` with the progress every `REPORT_S`. `show` and
    `wait` raise Cancelled as soon as `cancelled` returns true."""

    def __init__(
        self, name: str, total_bytes: int, report: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> None:
        self.name, self.total_bytes = name, total_bytes
        self._report, self._cancelled = report, cancelled
        self._finished_bytes = 0  # of the files before the current one
        self._reported_at = 0.0
        self._samples: deque[tuple[float, int]] = deque()  # (time, bytes done), of the last RATE_WINDOW_S

    def show(self, file_bytes: int, note: str = "") -> None:
        """`file_bytes` of the current file are on the disk."""
        if self._cancelled():
            raise Cancelled
        now = time.monotonic()
        if now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        done = self._finished_bytes + file_bytes
        if note or (self._samples and done < self._samples[-1][1]):
            self._samples.clear()
        self._samples.append((now, done))
        while self._samples[0][0] < now - RATE_WINDOW_S:
            self._samples.popleft()
        since, first = self._samples[0]
        rate = (done - first) / (now - since) if now - since > MIN_RATE_WINDOW_S else None
        self._report(Progress(self.name, done, self.total_bytes, rate, note))

    def finish_file(self, n_bytes: int) -> None:
        """The current file is complete, with `n_bytes`."""
        self._finished_bytes += n_bytes
        self._report(Progress(self.name, self._finished_bytes, self.total_bytes or self._finished_bytes))

    def wait(self, seconds: float, file_bytes: int, note: str) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.show(file_bytes, note)
            time.sleep(min(left, REPORT_S))
