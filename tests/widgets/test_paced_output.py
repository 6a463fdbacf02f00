"""Frames wait for the terminal."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from textual.app import ComposeResult
from textual.events import Key
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.widgets import Static

from tests.pilots import until_idle
from tests.waiting import until
from widgets.terminal import paced_output
from widgets.terminal.paced_output import QUESTION, PacedOutput, TerminalKey
from widgets.terminal.row_compositor import RowCompositor


class PacedApp(PacedOutput):
    def compose(self) -> ComposeResult:
        yield Static("none", id="text")


@contextlib.asynccontextmanager
async def paced():
    """An application, what it has written, and a function that shows a text."""
    app = PacedApp()
    async with app.run_test(size=(20, 3)) as pilot:
        written: list[str] = []
        app._driver.write = written.append  # type: ignore[method-assign]
        app._driver._writer_thread = object()  # type: ignore[attr-defined]

        async def show(text: str) -> None:
            app.query_one(Static).update(text)
            await pilot.pause()

        yield app, written, show


async def test_a_frame_waits_until_the_terminal_has_drawn_the_one_before():
    async with paced() as (app, written, show):
        await show("one")
        assert len(written) == 1 and "one" in written[0] and written[0].endswith(QUESTION)
        app._thread_has_written()
        for text in ("two", "three", "four"):
            await show(text)
        assert len(written) == 1, "they are collected"
        app.post_message(Key(TerminalKey.ANSWER, None))
        await until(lambda: len(written) == 2)
        assert "four" in written[1] and "three" not in written[1]
        app._thread_has_written()
        app.post_message(Key(TerminalKey.ANSWER, None))
        await show("four")
        assert len(written) == 2, "what has not changed is not written"


async def test_what_a_key_changes_does_not_wait_for_a_frame_on_its_way():
    """Over a line of 300 ms, it would come after 600."""
    async with paced() as (app, written, show):
        for text in ("one", "two"):
            await show(text)
            app._thread_has_written()
            assert len(written) == 1
        app.post_message(Key("x", "x"))
        await show("six")
        assert len(written) == 2 and "six" in written[1]
        app._thread_has_written()
        app.post_message(Key("y", "y"))
        await show("ten")
        assert len(written) == 2, "no more than two are on their way"
        app.post_message(Key(TerminalKey.ANSWER, None))
        await until(lambda: len(written) == 3)


async def test_a_long_line_is_not_thin():
    async with paced() as (app, _, show):
        await show("one")
        app._thread_has_written()
        for n_bytes, ago_s in ((10, 0.5), (paced_output.THIN_BYTES, 0.6), (paced_output.THIN_BYTES, 0.9)):
            assert not app.is_line_thin
            app._asked.clear()
            app._asked.append((time.monotonic() - ago_s, n_bytes))
            await app.on_event(Key(TerminalKey.ANSWER, None))
        assert app.is_line_thin and app.is_line_slow


async def test_a_terminal_that_does_not_answer_is_paced_by_what_is_written(monkeypatch):
    monkeypatch.setattr(paced_output, "PATIENCE_S", 0.05)
    async with paced() as (app, written, show):
        await show("one")
        app._thread_has_written()
        await show("two")
        await until(lambda: len(written) == 2)
        assert not written[1].endswith(QUESTION), "it is not asked again"
        await show("six")
        assert len(written) == 2, "the thread still writes"
        app._thread_has_written()
        await until(lambda: len(written) == 3)


async def test_what_waits_when_the_writing_thread_is_done_comes_in_time(monkeypatch):
    monkeypatch.setattr(paced_output, "PATIENCE_S", 0.05)
    async with paced() as (app, written, show):
        await show("one")
        app._dirty.update(range(3))
        app._rows.forget()
        app._is_waiting = False
        thread = threading.Thread(target=app._thread_has_written)
        thread.start()
        thread.join()
        await until(lambda: len(written) == 2)


async def test_only_rows_that_have_changed_are_drawn_and_once():
    async with paced() as (app, _, show):
        text, drawn = app.query_one(Static), list[int]()
        text.styles.height = 3
        await show("one")
        app._thread_has_written()
        app.post_message(Key(TerminalKey.ANSWER, None))
        await until(lambda: not app._asked)
        render_lines = text.render_lines
        text.render_lines = lambda crop: drawn.extend(crop.line_range) or render_lines(crop)  # type: ignore[method-assign, func-returns-value]
        text.refresh(Region(0, 1, 20, 1), Region(0, 2, 20, 1))
        await until(lambda: bool(drawn))
        assert drawn == [1, 2]


async def test_rows_are_those_that_textual_draws():
    async with paced() as (app, _, show):
        await show("one\n[b]two[/b]\nthree")
        compositor = app.screen._compositor
        assert isinstance(compositor, RowCompositor)
        assert list(compositor.rows([2, 0]).items()) == [
            (y, strip) for y, strip in enumerate(compositor.render_strips()) if y != 1
        ]


async def test_what_is_seen_through_a_page_is_drawn_with_each_frame():
    async with paced() as (app, written, show):
        await show("one")
        app.push_screen(page := ModalScreen())
        await until_idle()
        for _ in range(2):
            written.clear()
            page.refresh()
            app._forget()
            app._dirty.add(0)
            app._write_frame()
            assert "one" in written[0]


async def test_a_line_is_thin_if_large_frames_take_long():
    async with paced() as (app, _, show):
        await show("one")
        app._thread_has_written(took_s=1.0)
        assert app.is_line_slow and not app.is_line_thin, "a busy machine"
        app._frame_bytes = paced_output.THIN_BYTES
        app._thread_has_written(took_s=1.0)
        assert app.is_line_thin


def test_sizes_of_the_environment_do_not_hold_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "9999999")
    monkeypatch.setenv("LINES", "-5")
    app = PacedApp()
    assert app.console.width < 9999999 and not {"COLUMNS", "LINES"} & set(os.environ)
