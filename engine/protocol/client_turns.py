"""Whose prompt is made next."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from engine.fairness import Turns, whose_turn
from engine.protocol.events import Generate

LANES = 64 << 10, 1 << 20, 1 << 62
"""The most bytes of a request in each lane: no prompt waits for one that is very much longer."""


class ClientTurns:
    """Requests whose prompts are to be made. Clients take turns: the one goes first whose last turn is longest ago. One
    thread puts and one takes."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Generate]] = {}
        self._turns = Turns()
        self._lock = threading.Lock()

    def put(self, request: Generate) -> None:
        with self._lock:
            client = whose_turn(request.client, request.connection)
            self._waiting.setdefault(client, deque()).append(request)

    def take(self) -> Generate:
        with self._lock:
            client = min(self._waiting, key=self._turns.__getitem__)
            request = self._waiting[client].popleft()
            self._turns.served(client, time.perf_counter())
            if not self._waiting[client]:
                del self._waiting[client]
            if not self._waiting:
                self._turns.clear()
            return request


class PromptMakers:
    """A thread for each lane, in which clients take turns. Requests with a grammar have lanes of their own: to compile
    one may take seconds."""

    def __init__(self, make: Callable[[Generate], None]) -> None:
        self._make = make
        lanes = product(LANES, (False, True))
        self._lanes = {lane: (ThreadPoolExecutor(1, "prompts"), ClientTurns()) for lane in lanes}

    def put(self, request: Generate, n_bytes: int) -> None:
        """Has the prompt of a request made that came in so many bytes."""
        most = next(most for most in LANES if n_bytes <= most)
        thread, turns = self._lanes[most, request.grammar is not None]
        turns.put(request)
        thread.submit(lambda: self._make(turns.take()))
