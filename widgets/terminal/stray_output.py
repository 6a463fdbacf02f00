"""Keeps what libraries and child processes print out of a full screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def stray_output_to(log: IO[bytes]) -> Iterator[None]:
    """While the body shows a full screen, descriptors 1 and 2 lead to `log`: code that is not Python writes to them,
    and so do child processes that inherit them. Python's own streams lead to the terminal as before. Closes `log`."""
    with log, _led_to(log, "stdout", 1), _led_to(log, "stderr", 2):
        yield


@contextmanager
def _led_to(log: IO[bytes], name: str, descriptor: int) -> Iterator[None]:
    before = getattr(sys, name), getattr(sys, f"__{name}__")
    before[0].flush()
    terminal = os.dup(descriptor)
    with open(terminal, "w", encoding=before[0].encoding, errors="replace") as stream:  # noqa: PTH123
        os.dup2(log.fileno(), descriptor)
        _set(name, stream, stream)
        try:
            yield
        finally:
            stream.flush()
            os.dup2(terminal, descriptor)
            _set(name, *before)


def _set(name: str, stream: object, original: object) -> None:
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", original)
