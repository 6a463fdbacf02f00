"""A function in a fork of this process, which goes on meanwhile: for many system calls, each of which would let another
thread of this process run before it goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from engine.system.forked_module import may_fork


def call_in_fork(function: Callable[[], bytes]) -> Callable[[], bytes]:
    """Calls it now in a fork. What is returned waits for its result: empty if it failed. It is to be called once. If
    this process has several threads, or cannot fork, the result is empty, too."""
    if not may_fork():
        return bytes
    try:
        ours, theirs = os.pipe()
        pid = os.fork()
    except OSError:
        return bytes
    if not pid:
        try:
            with os.fdopen(theirs, "wb") as pipe:
                pipe.write(function())
        finally:
            os._exit(0)  # not the callers' frames, nor what is registered
    os.close(theirs)

    def result() -> bytes:
        with os.fdopen(ours, "rb") as pipe:
            sent = pipe.read()
        with suppress(ChildProcessError):  # who started this program ignores SIGCHLD
            os.waitpid(pid, 0)
        return sent

    return result
