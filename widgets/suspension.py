"""Suspends a full-screen program on SIGTSTP, and draws it anew when it goes on.

Textual's own handlers run in the middle of whatever the thread of the screen does. If that holds a lock, the program
hangs; and after a SIGCONT alone, two threads read the keyboard. Here signals wait for their turn between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from textual.app import App


def suspend_between_events(app: App[Any]) -> None:
    """To be called once, when the screen is there. Does nothing outside the main thread, where there are no signals."""
    is_ours = False

    def suspend() -> None:
        nonlocal is_ours
        is_ours = True
        with app.suspend():
            os.kill(os.getpid(), signal.SIGSTOP)  # returns when the program goes on

    def go_on() -> None:
        nonlocal is_ours
        if (
            not is_ours
        ):  # it was stopped by SIGSTOP: what the terminal shows, and how it sends keys, is not known
            with app.suspend():
                pass
        is_ours = False

    with contextlib.suppress(NotImplementedError, RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, suspend)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, go_on)
