"""What the server prints: where it listens, and a line for each request that has ended. Never a prompt or an answer."""

from __future__ import annotations

import sys

from app.cli.progress import StatusLine, describe, figures, say
from engine.events import Event, Failed, Ready
from widgets.request_list import Handled
from widgets.text import one_line


class Lines:
    """Writes requests to standard output, and all else to standard error."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._status = StatusLine(sys.stderr)

    def show(self, event: Event) -> None:
        """Takes an event of the engine's start."""
        if not isinstance(event, Ready | Failed):
            self._status.show(describe(event))
            return
        self._status.clear()
        if isinstance(event, Failed):
            say(sys.stderr, event.message, event.hint)
            return
        for warning in event.warnings:
            say(sys.stderr, warning)
        say(sys.stderr, describe(event))
        say(sys.stderr, f"listening on {self._address}")

    def handled(self, request: Handled) -> None:
        how = figures(request.finished) if request.finished else request.problem
        line = f"{request.time} {request.client} {request.path} {request.status}: {how}"
        print(one_line(line), flush=True)
