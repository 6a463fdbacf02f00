"""The end of the program does not wait for a thread that a disk, a driver or the network keeps.

asyncio and the interpreter wait for all threads before they end. What has to be done before is awaited by whoever
began it, so threads that are still at work then only read something for a screen that is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time

PATIENCE_S = 1.0

_left: list[threading.Thread] = []


def leave_threads() -> None:
    """The threads of the running event loop (`asyncio.to_thread`) will be left behind if they do not end soon. To be
    called before the first of them begins."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    class Threads(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            end = time.monotonic() + PATIENCE_S
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            _left.extend(thread for thread in self._threads if thread.is_alive())

    asyncio.get_running_loop().set_default_executor(Threads(thread_name_prefix="asyncio"))


def end_without_left_threads(code: int) -> int:
    """`code`, or the end of the process with this exit code if a thread was left behind."""
    if any(thread.is_alive() for thread in _left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
