"""HTTP: JSON, server-sent events, and clients that go away."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.serve.errors import ApiError

KEEP_ALIVE_S = 15.0
"""Between comments in a stream, as its specification recommends: proxies close connections on which nothing comes."""
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)


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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ServerSentEvents(Response):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), with a comment now and then.
    When the client goes, `events` is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        """`events` yields JSON values. The first says that the answer has begun; it is not sent. An ApiError is the
        last object of the stream."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
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
        comments = asyncio.ensure_future(_comments(send))
        try:
            await self._begun
            async for event in self._events:
                await send(_part(b"data: %s\n\n" % msgspec.json.encode(event)))
        except ApiError as error:
            await send(_part(b"data: %s\n\n" % msgspec.json.encode(error.body)))
        finally:
            comments.cancel()
        await send(_part(b"data: [DONE]\n\n", is_last=True))

    async def _close(self) -> None:
        self._begun.cancel()
        await asyncio.gather(self._begun, return_exceptions=True)
        await self._events.aclose()


def _part(data: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


async def _comments(send: Send) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        await send(_part(b": still here\n\n"))
