"""Keeps what libraries and child processes print out of a full screen, and out of a chat in lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO


@contextmanager
def stray_output_to(log: IO[bytes]) -> Iterator[None]:
    """While the body shows a full screen, descriptors 1 and 2 lead to `log`: code that is not Python writes to them,
    and so do child processes that inherit them. Python's own streams lead to the terminal as before. Closes `log`."""
    with log, _led_to(log, "stdout", 1), _led_to(log, "stderr", 2):
        yield


@contextmanager
def stray_errors_to(log: IO[bytes]) -> Iterator[None]:
    """The same for descriptor 2 alone, where lines are shown: panics of libraries are no part of a chat. Standard
    output stays, since the library for lines writes to it. Does nothing if standard error lies elsewhere: it was
    closed, or a caller reads it."""
    with log, ExitStack() as led:
        with suppress(OSError):
            if sys.stderr.fileno() == 2:
                led.enter_context(_led_to(log, "stderr", 2))
        yield


@contextmanager
def _led_to(log: IO[bytes], name: str, descriptor: int) -> Iterator[None]:
    before = getattr(sys, name), getattr(sys, f"__{name}__")
    before[0].flush()
    terminal = os.dup(descriptor)
    stream = open(terminal, "w", buffering=1, encoding=before[0].encoding, errors="replace")  # noqa: PTH123, SIM115
    os.dup2(log.fileno(), descriptor)
    _set(name, stream, stream)
    try:
        yield
    finally:
        with suppress(OSError):  # a terminal that was closed
            stream.flush()
        os.dup2(terminal, descriptor)
        _set(name, *before)
        with suppress(OSError):
            stream.close()


def _set(name: str, stream: object, original: object) -> None:
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", original)
