"""tinygrad 0.14.0 on CUDA: calls of the driver are watched, so that one that does not return is noticed.

tinygrad waits for a kernel in a call of the driver, without a bound. On NV it waits in Python, for 30 s. With this fix
all functions of the driver that tinygrad knows are `engine.devices.driver_watch.watched`.
"""

from __future__ import annotations

from tinygrad.runtime.autogen import cuda

from engine.devices.driver_watch import watched
from engine.fixes import once


@once("Watched calls of the driver")
def apply() -> None:
    """Changes tinygrad in this process."""
    for name, call in list(vars(cuda).items()):
        if name.startswith("cu") and hasattr(call, "argtypes"):
            setattr(cuda, name, watched(call))
