"""Waits until something holds. A minute without it is a failure, on any machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 60.0
_POLL_S = 0.01


async def until(holds: Callable[[], object], missing: Callable[[], str] = lambda: "It did not come.") -> None:
    """Looks again and again while the event loop runs. `missing` says what did not come."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(missing())
        await asyncio.sleep(_POLL_S)


def wait_until(holds: Callable[[], object]) -> None:
    """The same, without an event loop."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError("It did not come.")
        time.sleep(_POLL_S)
