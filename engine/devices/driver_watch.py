"""Notices calls of a device's driver that do not return, because a kernel hangs or the driver itself does.

Python cannot interrupt such a call, but other threads run meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LIMIT_S = 60
"""No call takes so long on a device that works: what an engine waits for is a step, or a piece of the weights. A step
of tensor graphs of a large model may (`work_s`)."""
_SECOND_S = 1.0
_RECENT = 3  # seconds before a call is first seen waiting, of whose work it may wait for the end

work_s: Callable[[], float] = lambda: 0.0
"""How long a slow device may take, in seconds, for all that this process has given it so far."""

_under_way: dict[int, object] = {}  # by thread: an object of its own for each call


def watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a function of the driver. Python may collect garbage at any place here, and what that frees on the device
    is a call of its own, within this one."""

    def run(*arguments: Any) -> Any:
        thread = threading.get_ident()
        outer = _under_way.get(thread)
        _under_way[thread] = object()
        try:
            return call(*arguments)
        finally:
            if outer is None:
                del _under_way[thread]
            else:
                _under_way[thread] = outer

    return run


def watch(hangs: Callable[[], object]) -> None:
    """Calls `hangs` in a thread of its own once a call has taken LIMIT_S, and what the work takes that was given to the
    device just before. A time in which the process was stopped does not count."""
    threading.Thread(target=_watch, args=(hangs,), name="driver watch", daemon=True).start()


def _watch(hangs: Callable[[], object]) -> None:
    left: dict[object, float] = {}  # seconds that each call may still take
    given = deque([work_s()], _RECENT)
    while all(seconds > 0 for seconds in left.values()):
        time.sleep(_SECOND_S)
        given.append(work_s())
        first = LIMIT_S + max(0.0, given[-1] - given[0])
        left = {call: left.get(call, first) - 1 for call in list(_under_way.values())}
    hangs()
