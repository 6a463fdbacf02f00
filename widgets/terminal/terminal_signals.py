"""Suspends a full-screen program on SIGTSTP, draws it anew when it goes on, and ends it with its terminal.

Textual's own handlers run in the middle of whatever the thread of the screen does. If that holds a lock, the program
hangs; and after a SIGCONT alone, two threads read the keyboard. Here signals wait for their turn between two events.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from textual.app import App

_GO_ON = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD,
    signal.SIGURG, signal.SIGWINCH, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM,
}  # fmt: skip
"""Signals that end no program, or cannot be handled, or are handled elsewhere; Python ignores two."""
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
ENDING = sorted(signal.valid_signals() - _GO_ON - _FAULTS)
"""Signals that end a program without a handler for them: its terminal would stay in the full screen, without echo.
(Where a library calls abort(3), the program ends all the same.)"""


def suspend_between_events(app: App[Any]) -> None:
    """To be called once, when the screen is there. A program that is about to end is left alone.

    A shell that ends sends SIGHUP and SIGCONT, and a keyboard that is read again by then is read for ever.
    """
    is_ours = False

    def is_ending() -> bool:
        return app.return_code is not None

    def suspend() -> None:
        nonlocal is_ours
        if is_ending():
            return
        is_ours = True
        with app.suspend():
            # 0: the whole job, as with a terminal's Ctrl+Z. Under `make chat` the shell would wait for make for ever.
            os.kill(0, signal.SIGSTOP)  # returns when the program goes on

    def go_on() -> None:
        nonlocal is_ours
        # After a SIGSTOP, it is not known how the terminal shows text and sends keys.
        if not is_ours and not is_ending():
            with app.suspend():
                pass
        is_ours = False

    _on_signals({signal.SIGTSTP: suspend, signal.SIGCONT: go_on})


def end_with_terminal(app: App[Any]) -> None:
    """Leaves the program in order on signals that end it, and when its terminal is gone without a word."""

    def leave_if_alone() -> None:
        if not os.isatty(0):
            app.exit()

    # Textual and asyncio would end on a second SIGINT in the middle of what the first one began.
    end_in_order(app.exit, signal.SIGINT, signal.SIGTERM, *ENDING)
    if os.isatty(0) and not app.is_headless:
        app.set_interval(1.0, leave_if_alone)


def end_in_order(end: Callable[[], object], *signals: int) -> None:
    """Calls `end` between two events when one of these signals has come."""
    _on_signals(dict.fromkeys(signals, end))


def _on_signals(handlers: Mapping[int, Callable[[], object]]) -> None:
    with contextlib.suppress(NotImplementedError, RuntimeError):  # there are none outside the main thread
        for number, handler in handlers.items():
            asyncio.get_running_loop().add_signal_handler(number, handler)
