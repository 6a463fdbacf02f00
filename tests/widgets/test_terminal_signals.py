"""Signals of the terminal. `tests/soak/suspensions.py` sends them to the program."""

import asyncio
import contextlib
import os
import signal

import pytest

from widgets.terminal.terminal_signals import ENDING, end_with_terminal, suspend_between_events


class App:
    """Remembers what is asked of it."""

    is_headless = False
    return_code = None

    def __init__(self):
        self.asked, self.checks = [], []

    @contextlib.contextmanager
    def suspend(self):
        self.asked.append("leave the screen")
        yield
        self.asked.append("draw the screen")

    def exit(self):
        self.asked.append("exit")

    def set_interval(self, seconds, check):
        self.checks.append(check)


@pytest.fixture
async def app(monkeypatch):
    app = App()
    monkeypatch.setattr(os, "kill", lambda *what: app.asked.append(what))
    yield app
    for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM, *ENDING):
        asyncio.get_running_loop().remove_signal_handler(number)


async def sent(app, number):
    """What is asked of the app because of a signal; nothing before the loop has its turn."""
    app.asked.clear()
    signal.raise_signal(number)
    assert not app.asked
    await asyncio.sleep(0.01)
    return app.asked


async def test_it_is_suspended_and_continued_between_two_events(app):
    suspend_between_events(app)
    whole_job = (0, signal.SIGSTOP)  # `make` above it, too
    suspended = ["leave the screen", whole_job, "draw the screen"]
    assert await sent(app, signal.SIGTSTP) == suspended
    assert await sent(app, signal.SIGCONT) == [], "it has been drawn"
    assert await sent(app, signal.SIGCONT) == ["leave the screen", "draw the screen"], (
        "nothing was said before"
    )
    app.return_code = 0
    assert await sent(app, signal.SIGTSTP) == await sent(app, signal.SIGCONT) == [], "it is about to end"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGIO, signal.SIGRTMAX]
)
async def test_it_ends_in_order(app, number):
    end_with_terminal(app)
    assert await sent(app, number) == ["exit"]


async def test_it_ends_when_its_terminal_is_gone_without_a_signal(app, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    end_with_terminal(app)
    [check] = app.checks
    check()
    assert app.asked == []
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    check()
    assert app.asked == ["exit"]
