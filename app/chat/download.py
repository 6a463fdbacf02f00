"""Downloads a model while the chat goes on, and says how far it is."""

import threading
from pathlib import Path

from engine.catalog.downloads import download
from engine.catalog.names import HubModel, WebFile
from engine.catalog.progress import Cancelled, Progress
from engine.errors import OrinError
from widgets.text import as_bytes, as_duration, one_line


def progress_text(progress: Progress) -> str:
    """model-Q8_0.gguf: 312 MB of 636 MB, 49 %, 41.2 MB/s, 8 s left."""
    done, total = progress.done_bytes, progress.total_bytes
    amount = f"{as_bytes(done)} of {as_bytes(total)}, {done / total:.0%}" if total else as_bytes(done)
    speed, left = progress.bytes_per_s, progress.seconds_left
    parts = (
        progress.note,
        amount if done or total else "",
        f"{as_bytes(round(speed))}/s" if speed else "",
        f"{as_duration(left)} left" if left is not None else "",
    )
    return one_line(f"{progress.file}: {', '.join(part for part in parts if part)}")


class Download:
    """A download in a daemon thread: the program may end before it, and the part that has arrived is kept. When it
    `is_over`, `path` or `error` is set, or neither if it was stopped."""

    def __init__(self, name: str, source: HubModel | WebFile) -> None:
        """`name` is for the user."""
        self.name, self.source = name, source
        self.progress = Progress(str(source), 0, 0)
        self.path: Path | None = None
        self.error: OrinError | None = None
        self.is_over = False
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="download", daemon=True).start()

    def stop(self) -> None:
        """Ends it soon; the part that has arrived is kept."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self.path = download(self.source, self._observe, self._stop.is_set)
        except OrinError as error:
            self.error = error
        except Cancelled:
            pass
        except Exception as error:
            self.error = OrinError(f"The download broke off: {type(error).__name__}: {error}.")
        self.is_over = True

    def _observe(self, progress: Progress) -> None:
        self.progress = progress
