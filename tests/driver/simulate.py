"""The simulated kernel, GPU and compiler in the place of the real ones."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from unittest import mock

from tinygrad.runtime.ops_nv import NVSignal
from tinygrad.runtime.support.system import System as TinySystem

from engine.tegra import device, driver
from tests.driver.compiler import SimulatedCUDARenderer
from tests.driver.kernel import SimulatedKernel


@contextlib.contextmanager
def simulated(kernel: SimulatedKernel | None = None, others: bool = False) -> Iterator[SimulatedKernel]:
    """Unless `others`, nothing but the simulated board is tried: a real GPU is never opened by mistake.

    The GPU is a thread: Python is to switch to it and back more often than each 5 ms, and who waits for it sleeps."""
    kernel = kernel or SimulatedKernel()
    before = driver.system, device.renderers, sys.getswitchinterval(), device.NVDevice.ifaces
    driver.system, device.renderers = kernel, [SimulatedCUDARenderer]
    if not others:
        device.NVDevice.ifaces = [device.TEGRAIface]
    sys.setswitchinterval(2e-5)
    try:
        TinySystem.memory_barrier()
    except AttributeError:  # without libatomic; x86 keeps the order of stores
        type(TinySystem).memory_barrier = lambda self: None
    stock_sleep = NVSignal._sleep

    def sleep(signal: NVSignal, waited_ms: int) -> None:
        time.sleep(1e-4)
        stock_sleep(signal, waited_ms)

    try:
        with mock.patch.object(NVSignal, "_sleep", sleep):
            yield kernel
    finally:
        driver.system, device.renderers = before[:2]
        sys.setswitchinterval(before[2])
        device.NVDevice.ifaces = before[3]
