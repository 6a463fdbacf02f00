"""Calls that may never return, such as those of NVML while the driver is in trouble: nobody waits long for them."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from engine.system import own_thread

PATIENCE_S = 2.0
T = TypeVar("T")


class Patient(Generic[T]):
    """Calls `call` in a thread of its own. Any threads may ask; one call is under way at a time."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._asking = call, threading.Lock()
        self._answer: Future[T] | None = None
        self._hangs = False

    def __call__(self) -> T | None:
        """What the call returns or raises. None if it takes longer than PATIENCE_S, and from then on at once, until it
        has returned."""
        with self._asking:
            if self._answer is None or self._answer.done():
                self._answer, self._hangs = own_thread.begin(self._call, "patient"), False
            answer = self._answer
        with contextlib.suppress(TimeoutError):
            return answer.result(0 if self._hangs else PATIENCE_S)
        self._hangs = True
        return None
