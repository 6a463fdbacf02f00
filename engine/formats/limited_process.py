"""Runs a module that reads what an untrusted file holds: a process of its own, killed when it takes too long."""

from __future__ import annotations

import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Timer
from typing import IO

from engine.child_process import kill, module_command, module_environment
from engine.errors import OrinError

START_S = 30.0  # for the process to start; on a busy machine that takes seconds


class LimitedProcess:
    """A module of this folder that sets itself limits (`process_limits`), prints "ready" and then answers requests. The
    process starts now, and ends with this object. One thread may use it at a time."""

    def __init__(self, module: str, failure: Callable[[str], OrinError]) -> None:
        """`failure` makes the error of a process that does not start, with a hint. Raises it."""
        self._failure = failure
        try:
            self._process = subprocess.Popen(
                module_command(f"engine.formats.{module}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=module_environment(),
                start_new_session=True,  # so that Ctrl-C in the terminal does not end it
            )
        except OSError as error:
            raise failure(f"The system says: {error.strerror}. Free some memory and try again.") from None
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
        """The stream of the answer to a request. After `seconds` the process is killed, so the stream may end early.
        Raises the error of a process that does not start."""
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
        timer = Timer(seconds, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
