"""tinygrad 0.14.0: while one thread generates code, the others may use devices.

What tinygrad generates must not depend on an open device, so it forbids the use of any meanwhile. But it forbids that
in all threads. On CUDA a thread fills the weights while the caller captures the first step. If a kernel of this step is
still to be compiled, as after a search that changed a schedule, the thread met `AssertionError: usage of device CUDA
disallowed`, and the model did not start.
"""

from __future__ import annotations

import threading
from typing import Any

from tinygrad import codegen, device
from tinygrad.uop.ops import UOp

from engine.fixes import once

_stock_to_program, _stock_allowed = codegen.do_to_program, device.ALLOW_DEVICE_USAGE
_generating: set[int] = set()  # the threads that generate code


@once("The use of devices beside the generation of code")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_to_program
    _stock_to_program = codegen.do_to_program  # another fix may have changed it since the import
    codegen.do_to_program = _to_program
    device.ALLOW_DEVICE_USAGE = _Allowed()


class _Allowed:
    """Whether the current thread may use devices. Where none generates code, tinygrad says so: its compiler processes
    may not."""

    def __bool__(self) -> bool:
        others = bool(_generating) and threading.get_ident() not in _generating
        return others or bool(_stock_allowed)


def _to_program(*arguments: Any) -> UOp:
    thread = threading.get_ident()
    is_nested = thread in _generating
    _generating.add(thread)
    try:
        return _stock_to_program(*arguments)
    finally:
        if not is_nested:
            _generating.discard(thread)
