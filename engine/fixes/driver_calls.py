"""tinygrad 0.14.0 on CUDA: calls of the driver are watched, so that one that does not return is noticed.

tinygrad waits for a kernel in a call of the driver, without a bound. On NV it waits in Python, for 30 s. With this fix
all functions of the driver that tinygrad knows are `engine.devices.driver_watch.watched`, and a call that waits for
much work may take long.
"""

from __future__ import annotations

from tinygrad.helpers import GlobalCounters
from tinygrad.runtime.autogen import cuda

from engine.devices import driver_watch
from engine.fixes import once

_SLOW_OPS, _SLOW_BYTES = 1e11, 1e10
"""Operations and bytes of memory a second that any GPU reaches, also with the kernels of tensor graphs."""


@once("Watched calls of the driver")
def apply() -> None:
    """Changes tinygrad in this process."""
    for name, call in list(vars(cuda).items()):
        if name.startswith("cu") and hasattr(call, "argtypes"):
            setattr(cuda, name, driver_watch.watched(call))
    driver_watch.work_s = _work_s


def _work_s() -> float:
    return float(GlobalCounters.global_ops / _SLOW_OPS + GlobalCounters.global_mem / _SLOW_BYTES)
