"""tinygrad 0.14.0: its kernel search (BEAM, JITBEAM) survives candidates that fault or hang.

tinygrad times candidates in its own process. If one faults, the device is unusable and all later ones fail; if one
hangs, tinygrad waits forever (on CUDA it ignores its timeout). With this fix each candidate runs as a trial
(`engine.cache.candidate_trial`): the process restarts, and the search skips the candidate from then on. A candidate is
identified by its compiled binary.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import tinygrad.codegen.opt.search as search
from tinygrad.uop.ops import UOp

from engine.cache.candidate_trial import CandidateFailedError, device_works, has_failed, trial
from engine.cache.disk_cache import disk_cache
from engine.fixes import require_tinygrad

LIMIT_S = 15.0  # tinygrad stops compiling a candidate after 10 s; timing one takes milliseconds
_stock = search._time_program


def apply() -> None:
    """Changes tinygrad in this process. Raises BackendError if another version is installed."""
    require_tinygrad("Trials of a search's candidates")
    search._time_program = _time_program


def _time_program(program: UOp, *args: Any, **options: Any) -> list[float]:
    binary = program.src[3].arg
    key = "beam", hashlib.sha256(binary).hexdigest()
    if has_failed(disk_cache(), key):
        return [math.inf]
    device = program.arg.target.device
    try:
        with trial(disk_cache(), key, LIMIT_S, lambda: device_works(device)):
            times: list[float] = _stock(program, *args, **options)
            return times
    except CandidateFailedError:
        return [math.inf]
