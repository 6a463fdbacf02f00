"""Clients of an event loop that take turns. The engine's process imports no asyncio, so this is not in
`engine.protocol.fairness`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class OneAtATime:
    """Has one of many go on at a time, in the order of their arrival, but of each client's only the first one waits in
    that order: clients take turns. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._clients: dict[str, asyncio.Lock] = {}
        self._waiting = Counter[str]()

    @property
    def waiting(self) -> int:
        """How many there are, with the one whose turn it is."""
        return self._waiting.total()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncGenerator[None, None]:
        """Waits for a turn of `client`, which lasts as long as the body."""
        self._waiting[client] += 1
        try:
            async with self._clients.setdefault(client, asyncio.Lock()), self._turn:
                yield
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client], self._clients[client]
