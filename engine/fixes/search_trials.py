"""tinygrad 0.14.0: a candidate of its search (BEAM, JITBEAM) that faults or hangs is met once.

tinygrad times candidates in its own process. One that faults leaves the device unusable, and all that follow fail;
one that hangs is waited for without end (on CUDA its timeout is not looked at). With this fix each is a trial
(`engine.candidate_trial`): the process is restarted, and the candidate remembered and left out from then on. What the
compiler makes of a kernel is what it is known by.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import tinygrad.codegen.opt.search as search
from tinygrad import Device
from tinygrad.uop.ops import UOp

from engine.candidate_trial import RefusedError, refused, trial
from engine.disk_cache import store
from engine.fixes import require_tinygrad

LIMIT_S = 15.0  # tinygrad stops to compile a candidate after 10; to time one takes milliseconds
_stock = search._time_program


def apply() -> None:
    """Changes tinygrad in this process. Raises BackendError where another version is installed."""
    require_tinygrad("Trials of a search's candidates")
    search._time_program = _time_program


def _time_program(program: UOp, *args: Any, **options: Any) -> list[float]:
    binary = program.src[3].arg
    key = "beam", hashlib.sha256(binary).hexdigest()
    if refused(store(), key):
        return [math.inf]
    device = program.arg.target.device
    try:
        with trial(store(), key, LIMIT_S, lambda: _is_well(device)):
            times: list[float] = _stock(program, *args, **options)
            return times
    except RefusedError:
        return [math.inf]


def _is_well(device: str) -> bool:
    try:
        Device[device].synchronize()
    except Exception:
        return False
    return True
