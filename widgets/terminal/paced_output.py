"""Draws on a terminal only what has changed, and only when the terminal has drawn the frame before.

On a slow line, frames would queue up: in this program, in the kernel, in SSH. A key would be seen only after all of
them. So each frame ends with a question to the terminal (DSR, ECMA-48 8.3.35). While its answer is missing, what
changes is collected for the next frame. Terminals that do not answer are paced by the file alone.
"""

import asyncio
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO, cast

from rich.console import RenderableType
from rich.control import Control
from textual import _ansi_sequences
from textual.app import App
from textual.driver import Driver
from textual.drivers._writer_thread import WriterThread
from textual.events import Event, Key, Resize
from textual.message import Message
from textual.screen import Screen

import widgets.terminal.closed_pages
import widgets.terminal.whole_characters  # noqa: F401 (both change what draws rows)
from widgets.terminal.pastes import ANSWERED
from widgets.terminal.row_compositor import ChangedRows, RowCompositor
from widgets.terminal.screen_rows import ScreenRows
from widgets.terminal.terminal_pictures import Shown, TerminalPictures

QUESTION, ANSWER = "\x1b[5n", "\x1b[0n"
SLOW_S, STAYS_SLOW_S = 0.08, 10.0
"""A line on which a frame takes longer than SLOW_S is slow, and is taken to be so for STAYS_SLOW_S."""
THIN_S, THIN_BYTES = 0.3, 4096
"""It is thin if a frame of so many bytes takes longer than THIN_S. On a busy machine, small frames take long, too."""
_ROUND_TRIPS = 32
"""Of so many frames, the quickest tells how long the line is."""
PATIENCE_S = 3.0
"""A terminal that has not answered its first question by then answers none; an answer later than this is lost."""


class TerminalKey(StrEnum):
    ANSWER = "terminal-answer"
    ANSWERED = ANSWERED


_ansi_sequences.ANSI_SEQUENCES_KEYS[ANSWER] = (TerminalKey.ANSWER,)  # type: ignore[index]


class _Reported:
    """The file of the writing thread; says when all that was queued is written."""

    def __init__(self, file: TextIO, written: Callable[[float], None]) -> None:
        """`written` gets the seconds that the terminal took for the last of it."""
        self._file, self._written = file, written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def flush(self) -> None:
        started = time.monotonic()
        self._file.flush()
        self._written(time.monotonic() - started)


class PacedOutput(App[None]):
    """A part of an application. `pictures` are those that the terminal draws."""

    @dataclass
    class PicturesMissed(Message):
        """The terminal could draw these, if `pictures` were given them."""

        shown: list[Shown]

    def __init__(self) -> None:
        for name in ("COLUMNS", "LINES"):  # sizes that do not follow the terminal, or are of another one
            os.environ.pop(name, None)
        super().__init__()
        self.pictures = TerminalPictures()
        self._rows = ScreenRows()
        self._dirty: set[int] = set()  # rows that may have changed
        self._asked = deque[tuple[float, int]]()  # when the terminal was asked after a frame of so many bytes
        self._round_trips_s = deque[float](maxlen=_ROUND_TRIPS)  # until it had answered
        self._is_typed = False  # a key was pressed, and nothing written since
        self._answers: bool | None = None  # None: not known yet
        self._is_waiting = False  # for an answer, with a timer
        self._slow_until = self._thin_until = 0.0
        self._frame_bytes = 0  # of the last frame
        self._is_writing = threading.Event()
        self._writer: WriterThread | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._context_here: contextvars.Context | None = None  # of its loop

    @property
    def is_line_slow(self) -> bool:
        """Whether the terminal is behind a slow line."""
        return time.monotonic() < self._slow_until

    @property
    def is_line_thin(self) -> bool:
        """Whether much of a frame takes long to arrive."""
        return time.monotonic() < self._thin_until

    def get_driver_class(self) -> type[Driver]:
        driver_class, app = super().get_driver_class(), self

        class ReportingDriver(driver_class):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                file: TextIO = self._file  # type: ignore[has-type]
                self._file = _Reported(file, app._thread_has_written)

            def stop_application_mode(self) -> None:
                if self._writer_thread is not None and (pictures := app.pictures.ended()):
                    self.write(pictures)
                super().stop_application_mode()

        return ReportingDriver

    @property
    def writes_rows(self) -> bool:
        """Whether frames are written by rows, of which the compositor only has to say which ones have changed."""
        return self._running and not self._batch_count and self._has_writer()

    def _has_writer(self) -> bool:
        """Whether a thread writes to a terminal. After the terminal was lent to somebody else there is a new one, and
        what it shows is not known."""
        writer = cast(WriterThread | None, getattr(self._driver, "_writer_thread", None))
        if writer is not None and writer is not self._writer:
            self._writer, self._events = writer, asyncio.get_running_loop()
            self._context_here = contextvars.copy_context()
            self._forget()
        return writer is not None

    def _forget(self) -> None:
        self._rows.forget()
        self._asked.clear()
        self._is_writing.clear()

    def _thread_has_written(self, took_s: float = 0.0) -> None:
        self._frame_took(took_s, self._frame_bytes)
        if self._is_writing.is_set():
            self._is_writing.clear()
            if self._events is not None and not self._events.is_closed():
                # Without its context, timers would not find their application.
                self._events.call_soon_threadsafe(self._write_frame, context=self._context_here)

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        if isinstance(renderable, ChangedRows):
            self._dirty.update(renderable.rows)
            self._write_frame()
            self.post_display_hook()
        else:
            super()._display(screen, renderable)

    @property
    def _has_drained(self) -> bool:
        if self._is_writing.is_set():
            return False
        if not self._asked:
            return True
        if time.monotonic() - self._asked[0][0] >= PATIENCE_S:
            self._answers = bool(self._answers)
            self._asked.clear()
            return True
        # What a key changes goes after a frame that is on its way: over a long line it would wait for both ways of it.
        return self._is_typed and len(self._asked) == 1 and not self.is_line_thin

    def write_pictures(self) -> None:
        """Writes what `pictures` have for the terminal, when it is ready for it."""
        if self._has_writer():
            self._write_frame()

    def _write_frame(self) -> None:
        """Writes what has changed, if the terminal is ready for it. None of a picture goes over a thin line."""
        has_pictures = self.pictures.is_due and not self.is_line_thin
        if not (self._dirty or has_pictures) or not self._running or self._closed or self._driver is None:
            return
        if not self._has_drained:
            if self._asked and not self._is_waiting:
                self._is_waiting = True
                self.set_timer(PATIENCE_S, self._stop_waiting)
            return
        dirty, self._dirty = self._dirty, set()
        compositor = cast(RowCompositor, self.screen._compositor)
        rows = compositor.rows({y for y in dirty if y < self.size.height}, self._background_screens)
        frame = self._rows.update({y: self.pictures.placed(strip) for y, strip in rows.items()}, self.console)
        if missed := self.pictures.missed():
            self.post_message(self.PicturesMissed(missed))
        pictures = self.pictures.question() + (self.pictures.due() if has_pictures else "")
        if not (frame or pictures):
            return
        cursor = self.screen.outer_size.clamp_offset(self.cursor_position)
        frame += Control.move_to(*cursor).segment.text
        if self._sync_available:
            frame = f"\x1b[?2026h{frame}\x1b[?2026l"
        frame = pictures + frame
        if self._answers is not False:
            frame += QUESTION
            self._asked.append((time.monotonic(), len(frame)))
        self._is_writing.set()
        self._is_typed = False
        self._frame_bytes = len(frame)
        self._driver.write(frame)

    def _frame_took(self, took_s: float, n_bytes: int, round_trip_s: float = 0.0) -> None:
        """`round_trip_s` is what the way takes there and back, however few bytes go."""
        if took_s > SLOW_S:
            self._slow_until = time.monotonic() + STAYS_SLOW_S
        if took_s - round_trip_s > THIN_S and n_bytes >= THIN_BYTES:
            self._thin_until = time.monotonic() + STAYS_SLOW_S

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        self._write_frame()

    async def on_event(self, event: Event) -> None:
        if isinstance(event, Key) and event.key == TerminalKey.ANSWER:
            if self._asked:
                asked_at, n_bytes = self._asked.popleft()
                self._round_trips_s.append(took_s := time.monotonic() - asked_at)
                self._frame_took(took_s, n_bytes, min(self._round_trips_s))
            self._answers = True
            self._write_frame()
            return
        if isinstance(event, Key) and event.key == TerminalKey.ANSWERED:
            if self.pictures.hear(event.character or ""):
                self._dirty.update(range(self.size.height))
            self.write_pictures()
            return
        if isinstance(event, Key):
            self._is_typed = True
        if isinstance(event, Resize):
            self._forget()
        await super().on_event(event)
