"""The ring of commands, and tinygrad's compute queue on it.

Two things differ from a desktop GPU's. Signals are semaphores in the command stream that wait for idle, never the
release in a launch descriptor (QMD): on an Orin, with that one, of 200 increments by dependent kernels 2 got lost.
And a submission waits while the ring is full, which tinygrad never looks at.

Between ring and doorbell stands tinygrad's fence, a barrier among the CPUs (`dmb ish`). It was enough on a board, but
that is an observation; whether it is what lost those updates is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad.helpers import getenv
from tinygrad.runtime.ops_nv import GPFifo, NVComputeQueue, NVSignal
from tinygrad.runtime.support.hcq import HCQSignal, MMIOInterface

ENTRIES = 1024  # at most so many submissions are under way: memory for commands and arguments is for these


@dataclass
class Ring(GPFifo):  # type: ignore[misc]
    """tinygrad's ring, with the place where the GPU tells how far it is."""

    gpget: MMIOInterface = None
    reports: bool = True  # whether the GPU does tell
    done: int = 0  # submissions known to be done, where it does not

    def probe(self) -> None:
        """To be called when all that was submitted is done: whether the GPU's position says so, which was not seen
        on a board."""
        patience = time.monotonic() + 0.1
        while self.gpget[0] != self.put_value % self.entries_count and self.reports:
            self.reports = time.monotonic() < patience

    def wait_for_room(self, device: Any) -> None:
        """Raises HangError when none comes."""
        if self.reports:
            following = (self.put_value + 1) % self.entries_count
            _wait(device, lambda: bool(self.gpget[0] != following))
        elif self.put_value - self.done >= self.entries_count - 2:
            # the value before last is that of a submission that was made; after it there was one at most
            value = device.timeline_value - 2
            _wait(device, lambda: bool(device.timeline_signal.value >= value))
            self.done = self.put_value - 1


def _wait(device: Any, passed: Callable[[], bool]) -> None:
    deadline = 0.0
    while not passed():
        now = time.monotonic()
        deadline = deadline or now + getenv("HCQDEV_WAIT_TIMEOUT_MS", 30000) / 1e3
        device.iface.sleep(0)
        if now > deadline:
            device.on_device_hang()


class TegraSignal(NVSignal):  # type: ignore[misc]
    """Its place goes back to tinygrad's pool, unless the device was closed and the place with it."""

    def __del__(self) -> None:
        if self.owner is not None and not self.owner.closed:
            super().__del__()


class TegraComputeQueue(NVComputeQueue):  # type: ignore[misc]
    def signal(self, signal: HCQSignal, value: Any = 0) -> TegraComputeQueue:
        self.active_qmd = None  # or the base class would put the signal into the launch descriptor
        super().signal(signal, value)
        return self

    def _submit_to_gpfifo(self, dev: Any, gpfifo: Ring) -> None:
        gpfifo.wait_for_room(dev)
        super()._submit_to_gpfifo(dev, gpfifo)
