"""The bodies of requests: how long one may be, compressed or not, how long it may take to arrive, and how many are held
at once."""

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.serve.errors import ApiError, unavailable
from app.serve.http import HOLDS, ClientGoneError
from engine.protocol.events import Generate

MAX_BODY_BYTES = 16 << 20
BODY_S = 60.0  # for the whole body to arrive
MAX_HELD_BYTES = 128 << 20
FREE_BYTES = 64 << 10
"""How much of each body does not count: ordinary requests are answered while others hold all that may be held. The
limit of connections bounds these."""
MAX_PARTS = 1 << 18
"""Lists and objects of a body. Making more of them takes so long that others wait for it."""
_PART_BYTES = {b"[": 256, b"{": 256, b",": 64}
"""What a list, an object (a message of a chat) and an element take once they are read. Those within texts count too."""
MAX_PARTS_BYTES = 192 << 20
_PARTS = "orin_chat.parts"
"""The key of an ASGI scope: what the body's parts take."""
_RETRY_S = 5
_PIECE_BYTES = 1 << 20


class _Room:
    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.held_bytes = most_bytes, 0


class _Share:
    """What a request holds of a room."""

    def __init__(self, room: _Room) -> None:
        self._room, self._held_bytes = room, 0

    def hold(self, n_bytes: int) -> None:
        """Raises ApiError if there is no room for so many bytes."""
        more = n_bytes - self._held_bytes
        self.check(more)
        self._held_bytes += more
        self._room.held_bytes += more

    def hold_more(self, n_bytes: int) -> None:
        """Raises ApiError if there is no room for so many bytes more. The first FREE_BYTES do not count."""
        self.hold(self._held_bytes + max(0, n_bytes - FREE_BYTES))

    def check(self, more_bytes: int) -> None:
        """Raises ApiError if there is no room for so many bytes more."""
        if more_bytes > 0 and self._room.held_bytes + more_bytes > self._room.most_bytes:
            raise unavailable("The server holds as many long requests as it may.", _RETRY_S)

    def let_go(self) -> None:
        self._room.held_bytes -= self._held_bytes
        self._held_bytes = 0


class Bodies:
    """ASGI middleware that bounds what all bodies together take from their first byte to the end of their answer, and
    what their parts take until the engine's request is made (`is_made`). One for which there is no room is refused with
    503: reading it raises ApiError."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bodies, self._parts = _Room(MAX_HELD_BYTES), _Room(MAX_PARTS_BYTES)
        self._inflating = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body_bytes = parts_bytes = 0
        held, others, parts = _Share(self._bodies), _Share(self._bodies), _Share(self._parts)
        inflate = (
            _Inflate(Request(scope).headers.get("content-encoding", "")) if scope["type"] == "http" else None
        )

        async def receive_counted() -> Message:
            nonlocal body_bytes, parts_bytes
            if not body_bytes:
                held.check(_stated_bytes(Request(scope)) - FREE_BYTES)
            message = await receive()
            if inflate and inflate.is_needed and message["type"] == "http.request":
                async with self._inflating:  # one after the other: others are answered between two of them
                    is_last = not message.get("more_body", False)
                    message = {**message, "body": await inflate(message.get("body", b""), is_last=is_last)}
            piece = message.get("body", b"")
            body_bytes += len(piece)
            parts_bytes += sum(n_bytes * piece.count(part) for part, n_bytes in _PART_BYTES.items())
            if body_bytes > FREE_BYTES:
                held.hold(body_bytes - FREE_BYTES)
                parts.hold(min(parts_bytes, MAX_PARTS_BYTES // 2))
            return message

        try:
            await self._app({**scope, _PARTS: parts, HOLDS: others.hold_more}, receive_counted, send)
        finally:
            held.let_go()
            others.let_go()
            parts.let_go()


def is_made(request: Request) -> None:
    """The body of `request` is forgotten: the engine's request has been made of it."""
    parts: _Share = request.scope[_PARTS]
    parts.let_go()


class _Inflate:
    """Makes of the pieces of a body in a Content-Encoding what was encoded, MAX_BODY_BYTES and one at most. gzip may
    have several members, one after the other (https://www.rfc-editor.org/rfc/rfc1952#page-5)."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding.strip().lower()
        self._is_known = self._encoding in ("gzip", "x-gzip", "deflate")
        self._inflater = self._next_member()
        self._left = MAX_BODY_BYTES + 1
        self._taken_bytes = 0  # members may be empty

    @property
    def is_needed(self) -> bool:
        return self._encoding not in ("", "identity")

    async def __call__(self, piece: bytes, *, is_last: bool) -> bytes:
        """Raises ApiError for an encoding that is not known, and for data that is not of it, or not whole. No data at
        all are no data: so are requests without a body, whose client says an encoding all the same."""
        if not self._is_known:
            accepted = {"Accept-Encoding": "gzip, deflate"}
            raise ApiError(415, "A request may be compressed with gzip or deflate.", headers=accepted)
        self._taken_bytes += len(piece)
        if self._taken_bytes > MAX_BODY_BYTES:
            raise _too_long()
        try:
            plain = await asyncio.to_thread(self._inflate, piece)
        except zlib.error:
            raise self._invalid() from None
        if is_last and self._taken_bytes and self._left and not self._inflater.eof:
            raise self._invalid()
        return plain

    def _inflate(self, piece: bytes) -> bytes:
        plain = bytearray()
        while self._left and piece:
            if self._inflater.eof:
                self._inflater = self._next_member()
            made = self._inflater.decompress(piece, self._left)
            plain += made
            self._left -= len(made)
            piece = self._inflater.unused_data
        return bytes(plain)

    @staticmethod
    def _next_member() -> "zlib._Decompress":
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header

    def _invalid(self) -> ApiError:
        return ApiError(400, f"The request is not valid {self._encoding}.")


async def read_body(request: Request) -> bytearray:
    """Raises ApiError for a body that is too long, has too many parts, finds no room or does not arrive,
    ClientGoneError if the client goes."""
    body = bytearray()
    if _stated_bytes(request) > MAX_BODY_BYTES:
        raise _too_long()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_long()
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise ApiError(408, "The request did not arrive in time.") from None
    if _most_parts(body) > MAX_PARTS and await asyncio.to_thread(_parts, body) > MAX_PARTS:
        raise ApiError(413, f"The request has more than {MAX_PARTS} lists and objects.")
    return body


def _too_long() -> ApiError:
    """It is in no variable of who raises it: with its frame, it would keep the body until garbage is collected."""
    return ApiError(413, f"The request is longer than {MAX_BODY_BYTES >> 20} MiB.")


def check_copies(body: bytearray, requests: Sequence[Generate]) -> None:
    """Raises ApiError if a long prompt is to be answered often: each request brings its own to the engine."""
    copies = len(requests) // max(1, len({id(request.prompt) for request in requests}))
    if len(body) * copies > MAX_BODY_BYTES:
        raise ApiError(
            413, f"The request is longer than {MAX_BODY_BYTES >> 20} MiB for its {copies} answers."
        )


def work_bytes(body: bytearray) -> int:
    """The length of a body for the work at it. What is gone through part by part, such as a schema, takes as long as
    the parts are many: a few microseconds for each, in which 128 bytes of text are read."""
    return max(len(body), 128 * _most_parts(body))


def is_too_much(data: bytes) -> bool:
    """Whether JSON is longer than a request may be, or has more parts."""
    return len(data) > MAX_BODY_BYTES or (_most_parts(data) > MAX_PARTS and _parts(data) > MAX_PARTS)


def _most_parts(body: bytes | bytearray) -> int:
    return body.count(b"[") + body.count(b"{")  # those within texts too


def _parts(body: bytes | bytearray) -> int:
    """How many lists and objects JSON has. What it does is short enough between two steps for other threads."""
    plain = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    count, in_text = 0, False
    for start in range(0, len(plain), _PIECE_BYTES):
        piece = np.frombuffer(plain, np.uint8, min(_PIECE_BYTES, len(plain) - start), start)
        in_texts = np.logical_xor.accumulate(piece == ord('"')) ^ in_text
        count += int(np.count_nonzero(((piece == ord("[")) | (piece == ord("{"))) & ~in_texts))
        in_text = bool(in_texts[-1])
    return count


def _stated_bytes(request: Request) -> int:
    """What the head of a request says of the length of its body; 0 if it says nothing."""
    with suppress(ValueError):
        return int(request.headers.get("content-length", 0))
    return 0
