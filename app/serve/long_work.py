"""Work that takes as long as a text is, such as making tokens of it for a client that counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from app.serve.errors import ApiError
from engine.protocol.one_at_a_time import OneAtATime
from engine.system.heap import give_back

T = TypeVar("T")
SHORT_BYTES = 64 << 10
"""Work on so much is done at once."""
_LANES = 1 << 20, 1 << 62
"""The most bytes of each lane: no text waits for one that is very much longer."""
MAX_WAITING = 64
MAX_TEXT_BYTES = 4 << 20
"""Making tokens of a text takes some 150 times as much memory."""


class LongWork:
    """A thread for each lane, in which clients take turns: each has one piece of work there at a time."""

    def __init__(self) -> None:
        self._lanes = [_Lane(most) for most in _LANES]

    async def run(self, client: str, n_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """Raises ApiError if too much waits, and what the work raises."""
        if n_bytes <= SHORT_BYTES:
            return await asyncio.to_thread(work, *arguments)
        return await next(lane for lane in self._lanes if n_bytes <= lane.most).run(client, work, *arguments)


class _Lane:
    def __init__(self, most: int) -> None:
        self.most = most
        self._thread = ThreadPoolExecutor(1, "long-work")
        self._turns = OneAtATime()

    async def run(self, client: str, work: Callable[..., T], *arguments: Any) -> T:
        if self._turns.waiting >= MAX_WAITING:
            message = "The server has as many long texts to work at as it may."
            raise ApiError(
                429, message, "rate_limit_error", code="too_many_requests", headers={"Retry-After": "5"}
            )
        async with self._turns.turn(client):
            return await asyncio.get_running_loop().run_in_executor(self._thread, _done, work, *arguments)


def _done(work: Callable[..., T], *arguments: Any) -> T:
    try:
        return work(*arguments)
    finally:
        give_back()
