"""The processes that compile kernels, as this one asks them. `engine.fixes.compiler_processes` says how they start.

A pool has threads that send tasks and receive results. They would make and forget nodes of graphs while the main thread
does so too, and then two nodes of one kind may exist, which tinygrad takes for different ones. So these threads see
bytes only: the thread that begins a task makes them, and the one that takes its result reads them.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.pool import AsyncResult, Pool
from typing import Generic, TypeVar

from tinygrad.engine import worker
from tinygrad.helpers import PARALLEL

from engine.devices import kept_clang
from engine.errors import print_without_messages

T = TypeVar("T")
failures: list[Exception] = []
"""Why this compiler process cannot work. It answers so: if it ended, others would begin in its place for ever."""


class Task(Generic[T]):
    """What a process was asked for."""

    def __init__(self, pool: Pool, function: Callable[..., T], *arguments: object) -> None:
        """Has a process call a function of a module."""
        self._pool = pool
        self._answer: AsyncResult[bytes] = pool.apply_async(called, (pickle.dumps((function, arguments)),))

    @property
    def is_lost(self) -> bool:
        """Whether its pool has ended."""
        return self._pool is not worker.worker_pool

    def is_done(self) -> bool:
        """Whether the result is there. That of a process that was killed never comes."""
        return self._answer.ready()

    def wait(self, seconds: float) -> bool:
        """Waits for the result; False if it did not come."""
        self._answer.wait(seconds)
        return self._answer.ready()

    def result(self) -> T:
        """Waits for the result, and raises what the process raised."""
        value: T = pickle.loads(self._answer.get())
        return value


def called(task: bytes) -> bytes:
    """Runs in a compiler process."""
    if failures:
        raise failures[0]
    function, arguments = pickle.loads(task)
    return pickle.dumps(function(*arguments))


def are_wanted() -> bool:
    """Whether there are such processes, or will be when `pool` is called. That waits until they start."""
    return bool(PARALLEL.value) and not multiprocessing.current_process().daemon


def pool() -> Pool | None:
    """The processes, which start when they are first asked for; None if there are to be none, or cannot be: their locks
    take a place in /dev/shm, which may be full."""
    try:
        found: Pool | None = worker.get_worker_pool()
    except OSError as error:
        print_without_messages(error)
        PARALLEL.value = 0
        return None
    return found


def end() -> None:
    """Ends the processes at once, and a clang that this one keeps. New processes start when they are asked for."""
    worker.terminate_worker_pool()
    kept_clang.end()
