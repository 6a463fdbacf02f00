"""The engine as the application sees it: the interface that every engine has, and the one that runs tinygrad
in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from engine.events import Event, Generate


class Engine(Protocol):
    """One thing that can answer a conversation: tinygrad here, llama-server, a server elsewhere.

    Nothing is raised for expected failures: both streams end with `Failed` instead. An engine answers one
    request at a time. After `Failed` with no `request_id` (the engine is gone) `start` may be called again.
    """

    name: str

    def start(self) -> AsyncIterator[Event]:
        """`Loading` and `Warming` while it starts, then `Ready` or `Failed` as the last event."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[Event]:
        """`Prefilling`, then `Token` and `Thinking`, then `Finished` or `Failed` as the last event."""
        ...

    async def stop(self) -> None:
        """Ends the answer in progress: its stream ends with `Finished(reason="cancelled")` within 100 ms."""
        ...

    async def close(self) -> None:
        """Ends the engine and all it started. Safe to call twice and at any time."""
        ...
