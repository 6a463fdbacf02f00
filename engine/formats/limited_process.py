"""Runs a module that reads what an untrusted file holds: a process of its own, killed when it takes too long.

What counts is the processor time that it takes, since on a busy machine a process may wait for a second and more.
"""

from __future__ import annotations

import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import IO

from engine.errors import OrinError, start_hint
from engine.system.child_process import kill, module_command, module_environment

START_S = 10.0  # of processor time for the process to start
_MOST_S = 30.0  # how much longer than its processor time it may take
_LOOK_S = 0.05


def start_module(module: str) -> subprocess.Popen[bytes]:
    """A process that runs a module of this program, with pipes to it and from it. Raises OSError."""
    return subprocess.Popen(
        module_command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=module_environment(),
        start_new_session=True,  # so that Ctrl-C in the terminal does not end it
    )


class LimitedProcess:
    """A module, by its whole name, that sets itself limits (`process_limits`), prints "ready" and then answers
    requests. The process starts now, and ends with this object. One thread may use it at a time."""

    def __init__(self, module: str, failure: Callable[[str], OrinError]) -> None:
        """`failure` makes the error of a process that does not start, with a hint. Raises it."""
        self._failure = failure
        try:
            self._process = start_module(module)
        except OSError as error:
            raise failure(f"The system says: {error.strerror}. {start_hint(error)}") from None
        assert self._process.stdin and self._process.stdout
        self._requests, self.answers = self._process.stdin, self._process.stdout
        self.end = weakref.finalize(self, kill, self._process)
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def write(self, request: bytes) -> None:
        """Does nothing if the process has died: reading finds that out."""
        with suppress(BrokenPipeError):
            self._requests.write(request)
            self._requests.flush()

    @contextmanager
    def asked(self, request: bytes, seconds: float) -> Iterator[IO[bytes]]:
        """The stream of the answer to a request. After `seconds` of processor time the process is killed, so the stream
        may end early. Raises the error of a process that does not start."""
        if not self._is_ready:
            with self._killed_after(START_S):
                self._is_ready = self.answers.readline() == b"ready\n"
        if not self._is_ready:
            self.end()
            raise self._failure("Install orin-chat again.")
        with self._killed_after(seconds):
            self.write(request)
            yield self.answers

    @contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        ended = Event()
        Thread(target=_watch, args=(self._process, seconds, ended), name="limit", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def _watch(process: subprocess.Popen[bytes], seconds: float, ended: Event) -> None:
    """Kills the process when it has taken so many seconds of processor time, or _MOST_S more of any."""
    began_s, used_s = time.monotonic(), _processor_s(process.pid)
    left_s = seconds
    while not ended.wait(max(left_s, _LOOK_S)):
        waited_s = time.monotonic() - began_s
        left_s = min(seconds - (_processor_s(process.pid) - used_s), seconds + _MOST_S - waited_s)
        if left_s <= 0 or not used_s:
            process.kill()
            return


def _processor_s(pid: int) -> float:
    """The processor time of a process, in seconds. 0 where the system does not tell it, or the process has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), as the C library of Linux makes it
    except OSError:
        return 0.0
