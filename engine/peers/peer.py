"""What all servers have in common as an `Engine`: streams that can be stopped, failures that end them."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from engine.errors import OrinError
from engine.events import (
    Event,
    Failed,
    Finished,
    Generate,
    Ready,
    StopReason,
    Thinking,
    Token,
)
from engine.formats.thinking import ThinkSplitter


@dataclass
class Tally:
    """What is known of an answer while it streams; times of tokens are ours unless the server tells its own.

    `first` and `last` are when the first and the last token came, `began` when the request went out.
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
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def token(self) -> None:
        """A token came."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.predicted_n += 1

    def finished(self, reason: StopReason | None = None) -> Finished:
        first = self.first or time.perf_counter()
        return Finished(
            request_id=self.request.request_id,
            reason=reason or self.reason,
            prompt_n=self.prompt_n,
            cached_n=self.cached_n,
            prompt_ms=(first - self.began) * 1e3 if self.prompt_ms is None else self.prompt_ms,
            predicted_n=self.predicted_n,
            predicted_ms=((self.last or first) - first) * 1e3
            if self.predicted_ms is None
            else self.predicted_ms,
            load_ms=self.load_ms,
            seed=self.seed,
        )


async def told_apart(
    events: AsyncIterator[Event], splitter: ThinkSplitter | None
) -> AsyncGenerator[Event, None]:
    """The events of an answer, thinking told from text by `splitter`, where it is not told yet. What that
    holds back at the end comes as one more token, whose id is -1."""
    request_id = 0
    async for event in events:
        if splitter and isinstance(event, Token) and not isinstance(event, Thinking):
            request_id = event.request_id
            thinking, text = splitter.feed(event.text)
            event = (Thinking if thinking else Token)(**asdict(replace(event, text=text)))
        elif splitter and isinstance(event, Finished):
            if text := splitter.flush()[1]:
                yield Token(request_id=event.request_id, id=-1, text=text)
            splitter = None
        yield event
    if splitter and (text := splitter.flush()[1]):
        yield Token(request_id=request_id, id=-1, text=text)


class Peer(ABC):
    """An `Engine` that is a server. A peer connects, answers and lets go; what it raises (OrinError) ends the
    stream as `Failed`. As with every engine, `generate` starts it where that has not been done."""

    name: str

    def __init__(self) -> None:
        self._ready: Ready | None = None
        self._connecting = asyncio.Lock()
        self._streams: set[_Stream] = set()

    # --- what a peer is made of ---

    @abstractmethod
    def _connect(self) -> AsyncIterator[Event]:
        """Connects: `Loading`, then `Ready` as the last event. To be cancelled at any time."""

    @abstractmethod
    def _answer(self, request: Generate, tally: Tally) -> AsyncIterator[Event]:
        """The events of the answer but the last, which is made of `tally`."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Lets go of the server. Called after any failure to connect, and at the end."""

    async def _gone(self, within_s: float = 0.0) -> OrinError | None:
        """Why the server does not answer again, if that is known, or becomes known within that time."""
        return None

    # --- Engine ---

    async def start(self) -> AsyncGenerator[Event, None]:
        stream = _Stream(None)
        async for event in self._follow(stream, self._start()):
            yield event

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        stream = _Stream(request)
        async for event in self._follow(stream, self._generate(stream, request)):
            yield event

    async def stop(self) -> None:
        for stream in [*self._streams]:
            if stream.tally:
                stream.put(stream.tally.finished("cancelled"))

    async def close(self) -> None:
        for stream in [*self._streams]:
            stream.put(
                stream.tally.finished("cancelled")
                if stream.tally
                else Failed(kind="backend", message=f"{self.name} was closed before it was ready.")
            )
        await asyncio.gather(
            *(stream.work for stream in self._streams if stream.work), return_exceptions=True
        )
        async with self._connecting:
            self._ready = None
            await self._disconnect()

    # --- streams ---

    async def _follow(
        self, stream: _Stream, work: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[Event, None]:
        """The events of `work`, done by a task of its own so that `stop` can end it at any time."""
        self._streams.add(stream)
        stream.work = asyncio.create_task(_pump(work, stream))
        try:
            while not stream.exhausted:
                yield await stream.next()
        finally:
            if not stream.work.cancelling():  # a second time would interrupt its tidying up
                stream.work.cancel()
            await asyncio.gather(stream.work, return_exceptions=True)
            self._streams.discard(stream)

    async def _start(self) -> AsyncGenerator[Event, None]:
        async with self._connecting:
            if self._ready:
                yield self._ready
                return
            failure = None
            try:
                async for event in self._connect():
                    if isinstance(event, Ready):
                        self._ready = event
                    yield event
            except OrinError as error:
                failure = Failed.from_error(error)
            finally:
                if not self._ready:
                    await self._disconnect()
            if failure:
                yield failure

    async def _generate(self, stream: _Stream, request: Generate) -> AsyncGenerator[Event, None]:
        if self._ready and await self._gone():  # since the last answer
            self._ready = None
            await self._disconnect()
        if not self._ready:
            async for event in self._start():
                yield event
                if isinstance(event, Failed):
                    return
        tally = stream.tally = Tally(request, self._ready.load_ms if self._ready else 0.0)
        try:
            async for event in self._answer(request, tally):
                yield event
            yield tally.finished()
        except OrinError as error:
            reason = await self._gone(within_s=0.3)
            if reason:
                self._ready = None
                await self._disconnect()
            yield Failed.from_error(reason or error, None if reason else request.request_id)


class _Stream:
    """The events of one call of `start` (without a request) or `generate`, as they come."""

    def __init__(self, request: Generate | None) -> None:
        self.tally = Tally(request) if request else None
        self.work: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._last_events = (Failed, Finished if request else Ready)
        self._ended = False

    @property
    def exhausted(self) -> bool:
        return self._ended and self._events.empty()

    async def next(self) -> Event:
        return await self._events.get()

    def put(self, event: Event) -> None:
        """Adds `event`; after one that ends the stream nothing is added, and the work on it ends."""
        if self._ended:
            return
        self._events.put_nowait(event)
        if isinstance(event, self._last_events):
            self._ended = True
            if self.work and self.work is not asyncio.current_task():
                self.work.cancel()


async def _pump(work: AsyncGenerator[Event, None], stream: _Stream) -> None:
    try:
        async for event in work:
            stream.put(event)
    except Exception as error:  # a mistake of ours: the stream must end all the same
        request_id = stream.tally.request.request_id if stream.tally else None
        stream.put(Failed.from_error(error, request_id))
        raise
    finally:
        await work.aclose()
