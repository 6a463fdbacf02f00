"""Runs candidates of a kernel search, which may fault or hang, and remembers which of them did.

A candidate that faults leaves the device unusable for this process; one that hangs never returns. Either way the
process restarts and never runs the candidate again. Each start is counted on disk before the candidate runs, so that a
candidate that kills the process at once is also known. It may start MAX_STARTS times, because the process may have been
killed for another reason.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.cache.disk_cache import DiskCache
from engine.errors import PreemptedError

MAX_STARTS = 2
_TABLE = "trials"
_EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the caller should try again


class CandidateFailedError(Exception):
    """The candidate does not work on this device. The next candidate can run in this process."""


def _exit() -> None:
    os._exit(_EXIT_STATUS)


restart: Callable[[], object] = _exit  # ends this process; the worker sets a function that replaces it


def has_failed(cache: DiskCache, key: object) -> bool:
    """Whether a candidate has failed in this or an earlier process."""
    return (cache.get(_TABLE, key) or 0) >= MAX_STARTS


@contextmanager
def trial(cache: DiskCache, key: object, limit_s: float, device_works: Callable[[], bool]) -> Iterator[None]:
    """Runs candidate `key` in its body, for up to `limit_s` seconds.

    If the body raises, the candidate counts as failed: raises CandidateFailedError if `device_works` afterwards, and
    restarts the process if it does not. If the time runs out, the process restarts too. PreemptedError is no failure.
    """
    starts = cache.get(_TABLE, key) or 0
    cache.put(_TABLE, key, starts + 1)
    watchdog = threading.Timer(limit_s, _time_out, (cache, key))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    except PreemptedError:
        cache.delete(_TABLE, key)
        raise
    except Exception as error:
        cache.put(_TABLE, key, MAX_STARTS)
        watchdog.cancel()
        if not device_works():
            restart()
        raise CandidateFailedError(str(error)) from error
    finally:
        watchdog.cancel()
    cache.delete(_TABLE, key)


def _time_out(cache: DiskCache, key: object) -> None:
    cache.put(_TABLE, key, MAX_STARTS)
    restart()


def device_works(device: str) -> bool:
    """Whether a device, by tinygrad's name, can still be used in this process."""
    from tinygrad import Device

    try:
        Device[device].synchronize()
    except Exception:
        return False
    return True
