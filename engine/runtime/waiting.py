"""The requests that wait for a slot. Clients take turns (`engine.protocol.fairness`); those of one come in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator

from engine.protocol.fairness import Held, Turns, order_of
from engine.runtime.jobs import Job


class Waiting:
    """The queues of all clients."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Job]] = {}  # none of them is empty
        self._turns = Turns()  # when the clients that have requests got their last slots
        self._count = itertools.count(1)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain(*self._queues.values())

    def number(self) -> int:
        """A number that is larger than all before."""
        return next(self._count)

    def add(self, job: Job) -> None:
        self._queues.setdefault(job.client, deque()).append(job)

    def put_back(self, job: Job) -> None:
        """Adds one that had a slot, before the others of its client."""
        self._queues.setdefault(job.client, deque()).appendleft(job)

    def first(self, held: Held) -> Job:
        """The one whose turn it is to get a slot. `held`: how many slots each client has. There must be one."""
        client = min(self._queues, key=lambda name: order_of(held[name], self._turns[name]))
        return self._queues[client][0]

    def take(self, job: Job) -> None:
        """Takes out one that gets a slot."""
        self._remove(job)
        self._turns.served(job.client, self.number())

    def take_cancelled(self) -> list[Job]:
        """Takes out those that were cancelled."""
        cancelled = [job for job in self if job.cancelled()]
        for job in cancelled:
            self._remove(job)
        return cancelled

    def tidy(self, client: str, holders: Collection[str]) -> None:
        """Forgets when a client had its turn if it has no request here and is not among the `holders` of slots."""
        if client not in self._queues and client not in holders:
            self._turns.forget(client)

    def _remove(self, job: Job) -> None:
        queue = self._queues[job.client]
        queue.remove(job)
        if not queue:
            del self._queues[job.client]
