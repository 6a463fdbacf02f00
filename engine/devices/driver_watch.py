"""Notices calls of a device's driver that do not return: behind a kernel that hangs, or since the driver itself does.

Python cannot interrupt such a call, but other threads run meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60
"""No call takes so long on a device that works: what an engine waits for is a step, or a piece of the weights."""
_SECOND_S = 1.0

_under_way: dict[int, object] = {}  # by thread: an object of its own for each call


def watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a function of the driver, which calls no other one."""

    def run(*arguments: Any) -> Any:
        thread = threading.get_ident()
        _under_way[thread] = object()
        try:
            return call(*arguments)
        finally:
            del _under_way[thread]

    return run


def watch(hangs: Callable[[], object]) -> None:
    """Calls `hangs` in a thread of its own once a call has taken LIMIT_S. A time in which the process was stopped does
    not count."""
    threading.Thread(target=_watch, args=(hangs,), name="driver watch", daemon=True).start()


def _watch(hangs: Callable[[], object]) -> None:
    seconds: dict[object, int] = {}
    while not any(n >= LIMIT_S for n in seconds.values()):
        time.sleep(_SECOND_S)
        seconds = {call: seconds.get(call, 0) + 1 for call in list(_under_way.values())}
    hangs()
