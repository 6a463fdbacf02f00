"""When a conversation is written to the history: soon after it has grown, and again after a failure."""

import asyncio
from collections.abc import Callable

SAVE_S = 0.1
"""A reply is in the history so soon after it has grown."""
RETRY_S = 3.0
"""A full disk may have room so soon after a failure. Another program's lock stops everything for 2 s each time."""


class Saver:
    def __init__(self, write: Callable[[], bool]) -> None:
        """`write` writes what the history lacks, and tells whether it could."""
        self._write = write
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> None:
        if not self._write():
            self._later(RETRY_S)

    def soon(self) -> None:
        """After a failure this is with the next try. Where the program is late, what is due comes before more text is
        shown."""
        if self._timer and asyncio.get_running_loop().time() >= self._timer.when():
            self._timer.cancel()
            self._due()
        self._later(SAVE_S)

    def _later(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        self.now()
