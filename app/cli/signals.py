"""Ends a command's work on a signal."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


async def run_until_signal(
    work: Coroutine[Any, Any, int | None],
    *signals: signal.Signals,
    stop: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Runs `work` and returns its exit code, or 128 + the number of the signal that ended it.

    A signal cancels `work`. With `stop`, a signal calls that instead, and `work` ends by itself."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    received: list[int] = []
    stops: list[asyncio.Future[None]] = []

    def handle(number: int) -> None:
        received.append(number)
        if stop is None:
            task.cancel()
        else:
            stops.append(asyncio.ensure_future(stop()))

    for number in signals:
        loop.add_signal_handler(number, handle, number)
    code = 0
    try:
        code = await task or 0
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        await asyncio.gather(*stops)
    return 128 + received[-1] if received else code
