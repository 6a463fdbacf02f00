"""Limits that a process sets itself before it reads what an untrusted file holds."""

import resource
from contextlib import suppress


def limit_memory(n_bytes: int) -> None:
    """Allows so much address space, and no dump of it."""
    _set(resource.RLIMIT_AS, n_bytes)
    _set(resource.RLIMIT_CORE, 0)


def limit_processor_time(seconds: int) -> None:
    """Allows a little more than the process has used so far. That ends it if nobody is there who would kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _set(kind: int, limit: int) -> None:
    """Sets a limit that may be raised again, as far as the user's own allows."""
    with suppress(OSError, ValueError):  # not every system has each limit
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
