"""Candidates of a search are tried where they may take the process down with them.

A candidate that faults leaves the device unusable for this process, one that hangs never comes back. Both cost a
restart of the process, are remembered, and are not tried again. What is being tried is noted before it runs, so
that one that kills the process outright is known as well: it may begin twice, for the process could have been
killed by someone else meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.disk_cache import Kept

BEGINNINGS = 2
_EXIT_STATUS = 75  # EX_TEMPFAIL: to be tried again


class RefusedError(Exception):
    """The candidate does not work here. Whatever is tried next is not touched by that."""


def _exit() -> None:
    os._exit(_EXIT_STATUS)


restart: Callable[[], object] = _exit  # what ends this process so that another goes on; a worker sets its own


def refused(kept: Kept, key: object) -> bool:
    """Whether it is known that a candidate does not work."""
    return (kept.get("trials", key) or 0) >= BEGINNINGS


@contextmanager
def trial(kept: Kept, key: object, seconds: float, is_well: Callable[[], bool]) -> Iterator[None]:
    """Within it, candidate `key` may do what it does for so many seconds. An exception makes it a refused one:
    RefusedError is raised where the device `is_well` afterwards, and the process restarted where it is not."""
    begun = kept.get("trials", key) or 0
    kept.put("trials", key, begun + 1)
    watchdog = threading.Timer(seconds, _hangs, (kept, key))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    except Exception as error:
        kept.put("trials", key, BEGINNINGS)
        watchdog.cancel()
        if not is_well():
            restart()
        raise RefusedError(str(error)) from error
    finally:
        watchdog.cancel()
    kept.forget("trials", key)


def _hangs(kept: Kept, key: object) -> None:
    kept.put("trials", key, BEGINNINGS)
    restart()
