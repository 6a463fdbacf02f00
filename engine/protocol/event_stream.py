"""What all engines of the application share: streams of events, and the counts and times of an answer in progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from engine.protocol.events import Event, Finished, Generate, StopReason


class EventStream:
    """The events for one caller, in order, up to and including the first one of a type in `last`.

    The queue has no bound: it never holds more than the tokens of one answer."""

    def __init__(self, *last: type[Event]) -> None:
        self.ended = asyncio.Event()
        self._last = last
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Adds `event`. Does nothing once the stream has ended."""
        if not self.ended.is_set():
            self._queue.put_nowait(event)
            if isinstance(event, self._last):
                self.ended.set()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        if self.ended.is_set() and self._queue.empty():
            raise StopAsyncIteration
        return await self._queue.get()


@dataclass
class AnswerStats:
    """The counts and times of an answer so far, from which `Finished` is made (its fields have the same meaning).

    `prompt_ms` and `predicted_ms` are given where a server reports them. Without, they follow from the times
    (time.perf_counter) when the request was sent and when the first and the last token came.
    """

    request: Generate
    load_ms: float = 0.0
    reason: StopReason = "stop"
    prompt_n: int = 0
    cached_n: int = 0
    predicted_n: int = 0
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    seed: int = 0
    sent_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    last_token_s: float | None = None

    def count_token(self) -> None:
        """To be called when a token comes."""
        self.last_token_s = time.perf_counter()
        self.first_token_s = self.first_token_s or self.last_token_s
        self.predicted_n += 1

    def finished(self, reason: StopReason | None = None) -> Finished:
        first = self.first_token_s or time.perf_counter()
        last = self.last_token_s or first
        return Finished(
            request_id=self.request.request_id,
            reason=reason or self.reason,
            prompt_n=self.prompt_n,
            cached_n=self.cached_n,
            prompt_ms=(first - self.sent_s) * 1e3 if self.prompt_ms is None else self.prompt_ms,
            predicted_n=self.predicted_n,
            predicted_ms=(last - first) * 1e3 if self.predicted_ms is None else self.predicted_ms,
            load_ms=self.load_ms,
            seed=self.seed,
        )
