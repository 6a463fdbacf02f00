"""The command ring, and tinygrad's compute queue that submits to it.

Two things differ from tinygrad on a desktop GPU. Signals are semaphore commands that wait for idle, never the release
in a launch descriptor (QMD): with that release, an Orin lost 2 of 200 increments by dependent kernels. And a submission
waits while the ring is full; tinygrad does not check that.

Between the write to the ring and the doorbell, tinygrad executes a memory barrier among the CPUs (`dmb ish`). It was
enough on a board, but this is an observation; whether it caused those lost updates is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad.helpers import getenv
from tinygrad.runtime.ops_nv import GPFifo, NVComputeQueue, NVSignal
from tinygrad.runtime.support.hcq import HCQSignal, MMIOInterface

ENTRIES = 1024  # submissions in flight at most; memory for commands and arguments is sized for them


@dataclass
class Ring(GPFifo):  # type: ignore[misc]
    """tinygrad's ring, with the position up to which the GPU has read it (`gpget`)."""

    gpget: MMIOInterface = None
    gpu_writes_position: bool = True
    done: int = 0  # submissions known to be done; used if the GPU does not write its position

    def check_position(self) -> None:
        """Finds out whether the GPU writes its position, which no board has shown yet. To be called when all
        submissions are done."""
        deadline = time.monotonic() + 0.1
        while self.gpget[0] != self.put_value % self.entries_count and self.gpu_writes_position:
            self.gpu_writes_position = time.monotonic() < deadline

    def wait_for_room(self, device: Any) -> None:
        """Returns when an entry is free. Raises HangError if none becomes free."""
        if self.gpu_writes_position:
            following = (self.put_value + 1) % self.entries_count
            _wait(device, lambda: bool(self.gpget[0] != following))
        elif self.put_value - self.done >= self.entries_count - 2:
            # The value before the last one belongs to a submission that was made; at most one came after it.
            value = device.timeline_value - 2
            _wait(device, lambda: bool(device.timeline_signal.value >= value))
            self.done = self.put_value - 1


def _wait(device: Any, is_over: Callable[[], bool]) -> None:
    """Raises HangError after HCQDEV_WAIT_TIMEOUT_MS, tinygrad's variable."""
    deadline = 0.0
    while not is_over():
        now = time.monotonic()
        deadline = deadline or now + getenv("HCQDEV_WAIT_TIMEOUT_MS", 30000) / 1e3
        device.iface.sleep(0)
        if now > deadline:
            device.on_device_hang()


class TegraSignal(NVSignal):  # type: ignore[misc]
    """Returns its memory to tinygrad's pool, unless the device was closed: then that memory is freed already."""

    def __del__(self) -> None:
        if self.owner is not None and not self.owner.closed:
            super().__del__()


class TegraComputeQueue(NVComputeQueue):  # type: ignore[misc]
    def signal(self, signal: HCQSignal, value: Any = 0) -> TegraComputeQueue:
        self.active_qmd = None  # else the base class puts the signal into the launch descriptor
        super().signal(signal, value)
        return self

    def _submit_to_gpfifo(self, dev: Any, gpfifo: Ring) -> None:
        gpfifo.wait_for_room(dev)
        super()._submit_to_gpfifo(dev, gpfifo)
