"""The base of engines that are servers: it runs their streams, stops them, and ends them with `Failed` on errors."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from engine.errors import BackendError, OrinError, UsageError
from engine.protocol.event_stream import AnswerStats, EventStream
from engine.protocol.events import Chat, Event, Failed, Finished, Generate, Ready, Sampling, Token

MOST_CHARS_A_TOKEN = 32  # on average over a reply; a token of usual text has 4
MOST_TOKENS = 1 << 17  # of a reply, where neither the user nor the server gives a number
EXIT_WAIT_S = 0.3  # after an answer failed: by then a server that crashed has ended


class ServerEngine(ABC):
    """An `Engine` that is a server. A subclass connects, answers and disconnects. An OrinError that it raises ends the
    stream as `Failed`. As with every engine, `generate` connects first if that has not been done."""

    name: str
    takes_tools = False  # whether its protocol has tools

    def __init__(self) -> None:
        self._server: httpx.AsyncClient | None = None
        self._ready: Ready | None = None
        self._connecting = asyncio.Lock()
        self._streams: set[_Stream] = set()

    # --- for subclasses ---

    @abstractmethod
    def _connect(self) -> AsyncIterator[Event]:
        """Sets `_server`. Yields `Loading`, then `Ready` as the last event. May be cancelled at any time."""

    @abstractmethod
    def _answer(self, request: Generate, stats: AnswerStats) -> AsyncIterator[Event]:
        """Yields all events of the answer but the last, which is made from `stats`."""

    async def _disconnect(self) -> None:
        """Called after any failure to connect, and at the end."""
        server, self._server = self._server, None
        if server:
            await server.aclose()

    async def _exit_error(self, within_s: float = 0.0) -> OrinError | None:
        """Why the server ended, if it has, or does within that time. None for a server that is not ours."""
        return None

    def _broken_off(self) -> BackendError:
        return BackendError(f"{self.name} ended its answer in the middle.", "Try again.")

    # --- Engine ---

    def start(self) -> AsyncGenerator[Event, None]:
        return self._run(_Stream(None), self._start())

    def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        stream = _Stream(request)
        return self._run(stream, self._generate(stream, request))

    async def stop(self) -> None:
        for stream in [*self._streams]:
            if stream.stats:
                stream.put(stream.stats.finished("cancelled"))

    async def close(self) -> None:
        for stream in [*self._streams]:
            stream.put(
                stream.stats.finished("cancelled")
                if stream.stats
                else Failed(kind="backend", message=f"{self.name} was closed before it was ready.")
            )
        tasks = [stream.task for stream in self._streams if stream.task]
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._connecting:
            self._ready = None
            await self._disconnect()

    # --- streams ---

    async def _run(self, stream: _Stream, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yields `events`. A task of its own computes them, so that `stop` can end it at any time."""
        self._streams.add(stream)
        stream.task = asyncio.create_task(_forward(events, stream))
        try:
            async for event in stream:
                yield event
        finally:
            if not stream.task.cancelling():  # a second cancellation would interrupt its clean-up
                stream.task.cancel()
            await asyncio.gather(stream.task, return_exceptions=True)
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
        if self._ready and await self._exit_error():  # the server ended since the last answer
            self._ready = None
            await self._disconnect()
        if not self._ready:
            async for event in self._start():
                yield event
                if isinstance(event, Failed):
                    return
        load_ms, context = (self._ready.load_ms, self._ready.context_length) if self._ready else (0.0, 0)
        stats = stream.stats = AnswerStats(request, load_ms)
        try:
            has_tools = isinstance(request.prompt, Chat) and request.prompt.tools
            if request.grammar or (has_tools and not self.takes_tools):
                raise UsageError(f"{self.name} gets no tools and no grammar from orin-chat.")
            limits = request.max_tokens, context or MOST_TOKENS
            # More characters than a reply has if the server keeps to these limits.
            left = MOST_CHARS_A_TOKEN * max(1024, min(limit for limit in limits if limit is not None))
            async for event in self._answer(request, stats):
                yield event
                left -= len(event.text) if isinstance(event, Token) else 0
                if left < 0:
                    raise BackendError(
                        f"{self.name} goes on beyond the end of its reply, which was stopped.",
                        "What came is kept. Set a limit where it runs, or take another server.",
                    )
            yield stats.finished()
        except OrinError as error:
            exit_error = await self._exit_error(within_s=EXIT_WAIT_S)
            if exit_error:
                self._ready = None
                await self._disconnect()
            yield Failed.from_error(exit_error or error, None if exit_error else request.request_id)


class _Stream(EventStream):
    """The events of one call of `start` (without a request) or `generate`."""

    def __init__(self, request: Generate | None) -> None:
        super().__init__(Failed, Finished if request else Ready)
        self.stats = AnswerStats(request) if request else None
        self.task: asyncio.Task[None] | None = None

    def put(self, event: Event) -> None:
        """The last event also cancels the task."""
        if self.ended.is_set():
            return
        super().put(event)
        if self.ended.is_set() and self.task and self.task is not asyncio.current_task():
            self.task.cancel()


async def _forward(events: AsyncGenerator[Event, None], stream: _Stream) -> None:
    try:
        async for event in events:
            stream.put(event)
    except Exception as error:  # a bug of ours: the stream must end all the same
        stream.put(Failed.from_error(error, stream.stats.request.request_id if stream.stats else None))
        raise
    finally:
        await events.aclose()


def chosen_seed(sampling: Sampling) -> int:
    """The seed asked for, else a random one of 31 bits, which every server takes."""
    return sampling.seed if sampling.seed is not None else random.getrandbits(31)
