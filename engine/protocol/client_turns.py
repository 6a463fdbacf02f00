"""Whose prompt is made next."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from engine.protocol.events import Chat, Generate
from engine.protocol.fairness import Turns, whose_turn

LANES = 64 << 10, 1 << 20, 1 << 62
"""The most bytes of a request in each lane: no prompt waits for one that is very much longer."""
TURN_S = 0.5
"""A turn ends after so long where the work gives way. To read one picture may take longer."""


class ClientTurns:
    """Requests whose prompts are to be made. Clients take turns: the one goes first whose last turn is longest ago. One
    thread takes."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Generate]] = {}
        self._turns = Turns()
        self._lock = threading.Lock()

    def put(self, request: Generate) -> None:
        with self._lock:
            client = whose_turn(request.client, request.connection)
            self._waiting.setdefault(client, deque()).append(request)

    def put_back(self, request: Generate) -> None:
        """Its client's turn has ended, and the next one is for it, too."""
        with self._lock:
            client = whose_turn(request.client, request.connection)
            self._turns.served(client, time.perf_counter())
            self._waiting.setdefault(client, deque()).appendleft(request)

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


class _Lane:
    def __init__(self) -> None:
        self.thread, self.turns = ThreadPoolExecutor(1, "prompts"), ClientTurns()


class PromptMakers:
    """A thread for each lane, in which clients take turns. Requests with a grammar have lanes of their own: to compile
    one may take seconds. Those with pictures have one, and another from a large one on: to read it may take as long."""

    def __init__(self, make: Callable[[Generate], Iterator[bool]]) -> None:
        """`make` gives way where other clients may have their turn, with True before what takes long."""
        self._make = make
        self._lanes = {lane: _Lane() for lane in product(LANES, (False, True))}
        self._pictures, self._large_pictures = _Lane(), _Lane()
        self._begun: dict[int, Iterator[bool]] = {}  # what gave way, by request

    def put(self, request: Generate, n_bytes: int) -> None:
        """Has the prompt of a request made that came in so many bytes."""
        most = next(most for most in LANES if n_bytes <= most)
        has_pictures = isinstance(request.prompt, Chat) and request.prompt.pictures
        lane = self._pictures if has_pictures else self._lanes[most, request.grammar is not None]
        lane.turns.put(request)
        lane.thread.submit(self._turn, lane)

    def _turn(self, lane: _Lane) -> None:
        request = lane.turns.take()
        end_s = time.perf_counter() + TURN_S
        making = self._begun.pop(request.request_id, None) or self._make(request)
        for takes_long in making:
            moves = takes_long and lane is not self._large_pictures
            if moves or time.perf_counter() >= end_s:
                self._begun[request.request_id] = making
                lane = self._large_pictures if moves else lane
                lane.turns.put_back(request)
                lane.thread.submit(self._turn, lane)
                return
