"""Work in a thread of its own, for what may never return, or needs another stack."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T], name: str, *, daemon: bool = True) -> Future[T]:
    """Begins `work` in a new thread; returns what is going to have its result, or what it raises. The program does not
    wait for a `daemon` at its end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return done
