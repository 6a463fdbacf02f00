"""One connection of a client, as uvicorn runs it, with ends to what uvicorn waits for."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # for the head of a request to arrive, and for a body that nobody waits for
MOST_CONNECTIONS = 4096
"""More than the system lets wait for their acceptance: an honest client among many that vanish is not refused."""

READ_BYTES = 16 << 10
"""What is read of a connection before others have their turn. asyncio reads 256 kB, which can be 40,000 chunks of a
byte each: that took a second, several times in one request."""


class Connection(H11Protocol):
    """A connection on which the head of a request must arrive in time, and the rest of a request that has been
    answered. uvicorn waits for ever otherwise, and each connection takes a file descriptor. For one beyond the limit
    that is closed whose client has let the server wait longest: so nobody keeps others out with connections on which
    nothing comes."""

    most: ClassVar[int] = MOST_CONNECTIONS
    _silent: ClassVar[dict["Connection", None]] = {}
    """The connections whose clients have to send something, in the order in which they began to wait."""
    _due: asyncio.TimerHandle | None = None
    _awaited: object = None  # the client's state when the time began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._lingering = _Lingering(transport, self._drop_rest)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        self._sort()
        if len(self.connections) > self.most:
            next((c for c in self._silent if not c.transport.is_closing()), self).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._lingering.lingers:
            super().data_received(data)
            self._sort()
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._sort()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lingering.ended()
        self._silent.pop(self, None)
        self._watch()

    def _sort(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._silent.setdefault(self)
        else:
            self._silent.pop(self, None)

    def _drop_rest(self) -> bool:
        """Whether the client still sends a request that has its answer. What comes of it is dropped then."""
        is_sending = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if is_sending:
            self.flow.resume_reading()
        return is_sending

    def _watch(self) -> None:
        state, is_answered = self.conn.their_state, self.conn.our_state is h11.DONE
        waits = state is h11.IDLE or (state is h11.SEND_BODY and is_answered)
        waits = waits and not self.transport.is_closing()
        if self._due and not (waits and state is self._awaited):
            self._due.cancel()
            self._due = None
        if waits and not self._due:
            self._awaited, self._due = state, self.loop.call_later(HEAD_S, self.transport.abort)


class _Lingering:
    """A transport that, when it is to be closed while the client still sends, waits for the end of that. If it closed
    at once, the system would reset the connection, and the client would lose what it had not read of its answer."""

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport, self._is_sending = transport, is_sending
        self._end: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def lingers(self) -> bool:
        return self._end is not None

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._is_sending():
            self._transport.close()
        else:
            self._end = asyncio.get_running_loop().call_later(HEAD_S, self._transport.abort)
            self._transport.write_eof()

    def ended(self) -> None:
        if self._end:
            self._end.cancel()
