"""What the engine process gets: commands, in a thread of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from engine.errors import print_without_messages
from engine.protocol.events import Cancel, Generate, Load, Request, Shutdown, Tune, command_decoder
from engine.protocol.outbox import die
from engine.protocol.transport import Deframer, frame

if TYPE_CHECKING:
    from engine.runtime.answer import Answer


@dataclass(frozen=True)
class Begun:
    """A request that can be answered now, or why it cannot; None if it was cancelled before."""

    request_id: int
    answer: Answer | Exception | None


@dataclass
class Known:
    """A request that has not ended: how long it is, what is set when it is cancelled, and when it came
    (`time.perf_counter`)."""

    n_bytes: int
    stop: threading.Event = field(default_factory=threading.Event)
    came_s: float = field(default_factory=time.perf_counter)


class Inbox:
    """Reads commands in a thread of its own. `interruptible` says that the main thread asks whether to stop. Before,
    while it loads, `Shutdown` ends the process at once."""

    def __init__(self, sock: socket.socket, earlier: bytes = b"") -> None:
        """`earlier` holds the frames that an earlier process read from the socket."""
        self.interruptible = False
        self._sock, self._earlier = sock, earlier
        self._deframer = Deframer()
        self._payloads: list[bytes] = []  # of all commands, while the model loads
        self._reading = threading.Lock()
        self._queue: SimpleQueue[Load | Request | Begun | None] = SimpleQueue()
        self._first: list[Load | Request | Begun | None] = []  # what was waited for, before those
        self._known: dict[int, Known] = {}
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def get(self) -> Load | Request | Begun | None:
        """The next command; None after `Shutdown`."""
        return self._first.pop() if self._first else self._queue.get()

    def put(self, begun: Begun) -> None:
        """Gives the main thread a request that can be answered now."""
        self._queue.put(begun)

    def has_request(self) -> bool:
        return bool(self._first) or not self._queue.empty()

    def wait_for_request(self, seconds: float) -> None:
        """Returns when there is a request, or after so many seconds."""
        if not self._first:
            with contextlib.suppress(Empty):
                self._first.append(self._queue.get(timeout=seconds))

    def known(self, request_id: int) -> Known:
        return self._known[request_id]

    def forget(self, request_id: int) -> None:
        self._known.pop(request_id, None)

    def close(self) -> bytes:
        """Stops reading from the socket, and returns all frames so far."""
        self._reading.acquire()
        return b"".join(map(frame, self._payloads)) + self._deframer.incomplete

    def _read(self) -> None:
        try:
            data = self._earlier
            while data or self._sock.recv(1, socket.MSG_PEEK):
                with self._reading:
                    for payload in self._deframer.feed(data or self._sock.recv(1 << 16)):
                        if not self.interruptible:
                            self._payloads.append(payload)
                        self._take(payload)
                data = b""
        except Exception as error:  # the client sent something that is not a command
            print_without_messages(error)
        die()

    def _take(self, payload: bytes) -> None:
        command = command_decoder.decode(payload)
        if isinstance(command, Cancel):
            if known := self._known.get(command.request_id):
                known.stop.set()
        elif isinstance(command, Shutdown):
            if not self.interruptible:
                die()
            for known in list(self._known.values()):
                known.stop.set()
            self._queue.put(None)
        else:
            if isinstance(command, Generate | Tune):
                self._known[command.request_id] = Known(len(payload))
            self._queue.put(command)
