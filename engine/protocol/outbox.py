"""What the engine process sends: events, in a thread of their own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from queue import SimpleQueue
from typing import Never

from engine.protocol.events import Event, Token
from engine.protocol.transport import pack

_SEND_INTERVAL_S = 0.01


class Outbox:
    """Sends events in a thread of its own. Waking the client can take as long as a few small kernels, and a client
    that does not read for a while must not delay the answer. After a token, the next ones go together; neither what
    comes before a reply nor its end delays the next first token. The queue holds one answer at most."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames: SimpleQueue[tuple[bytes, bool]] = SimpleQueue()  # and whether it is a token
        self._sender = threading.Thread(target=self._send, name="events", daemon=True)
        self._sender.start()

    def put(self, event: Event) -> None:
        self._frames.put((pack(event), isinstance(event, Token)))

    def close(self) -> None:
        """Returns when all events are sent."""
        self._frames.put((b"", False))
        self._sender.join()

    def _send(self) -> None:
        closing = False
        while not closing:
            frames = [self._frames.get()]  # after a pause, the first one is sent without delay
            while not self._frames.empty():
                frames.append(self._frames.get())
            parcel = b"".join(frame for frame, _ in frames)
            closing = not frames[-1][0]
            try:
                self._sock.sendall(parcel)
            except OSError:
                die()
            if frames[-1][1]:
                time.sleep(_SEND_INTERVAL_S)


def die() -> Never:
    """Ends this process and the compilers that it started, at once. (PR_SET_PDEATHSIG would end this process alone,
    before it could end its compilers.)"""
    if os.getpgrp() == os.getpid():
        # multiprocessing's resource tracker ignores SIGTERM, and cleans up after the other children.
        os.killpg(0, signal.SIGTERM)
    os._exit(1)
