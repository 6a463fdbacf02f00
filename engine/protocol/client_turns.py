"""Whose prompt is tokenized next."""

from __future__ import annotations

import threading
import time
from collections import deque

from engine.protocol.events import Generate


class ClientTurns:
    """Requests whose prompts are to be tokenized. Clients take turns: the one goes first whose last turn is longest
    ago. One thread puts and one takes."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Generate]] = {}
        self._served: dict[str, float] = {}  # when each client that waits had its last turn
        self._lock = threading.Lock()

    def put(self, request: Generate) -> None:
        with self._lock:
            self._waiting.setdefault(request.client, deque()).append(request)

    def take(self) -> Generate:
        with self._lock:
            client = min(self._waiting, key=lambda name: self._served.get(name, 0.0))
            request = self._waiting[client].popleft()
            self._served[client] = time.perf_counter()
            if not self._waiting[client]:
                del self._waiting[client]
            if not self._waiting:
                self._served.clear()
            return request
