"""What the server prints: where it listens, and a line for each request that has ended. Never a prompt or an answer."""

import sys
from contextlib import suppress

from msgspec.structs import replace

from app.cli.oneshot import TextOutput
from app.cli.progress import describe, figures
from engine.protocol.events import Event, Loading, Ready
from widgets.dashboard.request_list import Handled
from widgets.text import one_line


class Lines:
    """Writes requests to standard output, and all else to standard error."""

    def __init__(self, address: str) -> None:
        self._address, self._output = address, TextOutput(sys.stdout, sys.stderr)
        self._says_loading = False

    def show(self, event: Event) -> None:
        """Takes an event of the engine's start."""
        self._output.show(event)
        if isinstance(event, Loading) and not self._says_loading:
            self._says_loading = True
            if not sys.stderr.isatty():  # which shows how far it is
                self._output.say(describe(replace(event, total_bytes=0)))
        if isinstance(event, Ready):
            self._output.say(describe(event))
            self._output.say(f"listening on {self._address}")

    def handled(self, request: Handled) -> None:
        """Requests are also answered while the disk is full to which standard output goes, or when its reader has
        gone."""
        how = figures(request.finished) if request.finished else request.problem
        note = f" ({request.note})" if request.note else ""
        model = f" {request.model}" if request.model else ""
        line = f"{request.time} {request.client} {request.path}{model} {request.status}: {how}{note}"
        with suppress(OSError):
            print(one_line(line), flush=True)
