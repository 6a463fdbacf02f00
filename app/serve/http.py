"""HTTP: JSON, streams of it, and clients that go away."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.serve.errors import ApiError, form_of

KEEP_ALIVE_S = 5.0
"""Between signs of life in a stream: proxies close connections on which nothing comes, and so do some clients."""
QUIET_S = 20.0
"""An answer that is not streamed has its first sign of life after so long: with it goes the status."""
PIECE_BYTES = 256 << 10
HOLDS = "orin_chat.holds"
"""The key of an ASGI scope: a function that counts so many bytes more to what a request holds, until it has ended. It
raises ApiError if there is no room for them."""
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


class InPieces(Response):
    """A response whose body is sent as its client takes it, and is counted until then, if it is long."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _hold(self.body, scope)
        except ApiError as error:
            return await error_response(error, scope["path"])(scope, receive, send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_body(bytes(self.body), send)


def _hold(body: bytes | memoryview, scope: Scope) -> None:
    """Counts a long body to what its request holds. Raises ApiError if there is no room for it."""
    if len(body) > PIECE_BYTES:
        scope[HOLDS](len(body))


async def _send_body(body: bytes, send: Send) -> None:
    view = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        await send(_part(bytes(view[start : start + PIECE_BYTES])))
    await send(_part(b"", is_last=True))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return InPieces(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: ApiError, path: str) -> Response:
    """`error` as clients of `path` expect it."""
    return json_response(form_of(path)(error), error.status, error.headers)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it when the client goes. Raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        del task  # an error of it would keep it with this frame, and the request, until garbage is collected


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Framing:
    """How JSON values follow each other in a stream. `still_here` is what nobody takes for one of them, if there is
    such a thing, and `end` comes after the last one."""

    media_type: str
    frame: Callable[[Any], bytes]
    still_here: bytes = b""
    end: bytes = b""


# https://html.spec.whatwg.org/multipage/server-sent-events.html
SSE = "text/event-stream"
_COMMENT = b": still here\n\n"
COMMENTED = Framing(SSE, lambda value: b"data: %s\n\n" % _json(value), _COMMENT)
DATA = replace(COMMENTED, end=b"data: [DONE]\n\n")
NAMED_DATA = replace(
    COMMENTED, frame=lambda value: b"event: %s\ndata: %s\n\n" % (value["type"].encode(), _json(value))
)
LINES = Framing("application/x-ndjson", lambda value: _json(value) + b"\n")


class Writer(Protocol):
    """What a stream asks of who writes its values."""

    @property
    def framing(self) -> Framing: ...

    def pings(self) -> Iterable[Any]:
        """Values that say that the answer is still worked at; none if a comment does."""
        ...

    def failed(self, error: ApiError) -> Any:
        """The last value of a stream that is broken off."""
        ...


class EventStream(Response):
    """A stream of values, with a sign of life now and then. When the client goes, `events` is closed."""

    def __init__(self, events: AsyncGenerator[Any, None], writer: Writer) -> None:
        """`events` yields JSON values. The first says that the answer has begun; it is not sent. Of an ApiError the
        `writer` makes the last value."""
        self._framing, self._writer, self._events = writer.framing, writer, events
        self.media_type = self._framing.media_type
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._begun = asyncio.ensure_future(anext(events))

    async def begin(self, receive: Receive) -> None:
        """Waits until the answer has begun or has failed, but not longer than a proxy may. Raises ApiError and
        ClientGoneError."""
        try:
            await while_connected(receive, asyncio.wait([self._begun], timeout=KEEP_ALIVE_S))
            if self._begun.done():
                await self._begun
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError):
                await while_connected(receive, self._send(send))
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        frame, signs = self._framing.frame, asyncio.ensure_future(self._signs_of_life(send))
        try:
            await self._begun
            async for event in self._events:
                await send(_part(frame(event)))
        except ApiError as error:
            await send(_part(frame(self._writer.failed(error))))
        finally:
            signs.cancel()
        await send(_part(self._framing.end, is_last=True))

    async def _signs_of_life(self, send: Send) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if sign := b"".join(map(self._framing.frame, self._writer.pings())) or self._framing.still_here:
                await send(_part(sign))

    async def _close(self) -> None:
        self._begun.cancel()
        await asyncio.gather(self._begun, return_exceptions=True)
        await self._events.aclose()
        del self._begun  # see `while_connected`


class SlowJson(InPieces):
    """JSON that may take long to make. After `QUIET_S` white space is sent, as JSON may begin with it, and again and
    again. What fails later is told with the status that was sent, 200. When the client goes, the work is cancelled."""

    def __init__(self, work: Coroutine[Any, Any, Any], failed: Callable[[ApiError], Any]) -> None:
        """`work` gives the value that is sent; if it raises an ApiError, `failed` makes one of that."""
        super().__init__(media_type="application/json")
        self._work, self._failed = asyncio.ensure_future(work), failed

    async def begin(self, receive: Receive) -> None:
        """Waits until the value is there, but not longer than a proxy may. Raises ApiError and ClientGoneError."""
        try:
            await while_connected(receive, asyncio.wait([self._work], timeout=QUIET_S))
            if self._work.done():
                self.body = _json(await self._work)
                self.headers["content-length"] = str(len(self.body))
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.body:
            return await super().__call__(scope, receive, send)
        try:
            with suppress(ClientGoneError):
                await while_connected(receive, self._send(scope, send))
        finally:
            await self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        del self.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not self._work.done():
            await send(_part(b" "))
            await asyncio.wait([self._work], timeout=KEEP_ALIVE_S)
        try:
            body = _json(await self._work)
            _hold(body, scope)
        except ApiError as error:
            body = _json(self._failed(error))
        await _send_body(body, send)

    async def _close(self) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        del self._work  # see `while_connected`


def _part(data: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
