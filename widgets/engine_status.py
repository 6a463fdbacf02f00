"""What the screen says of an engine: one immutable snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    STOPPING = "stopping"
    GONE = "gone"


@dataclass(frozen=True)
class EngineStatus:
    """`done` of `total` are bytes while loading, kernels while warming and prompt tokens while prefilling
    (total 0: not known). `cached` of the kernels were known from an earlier run. In a search these count products,
    and `searching` is the one for which the fastest way is looked for ("" without a search). `model`,
    `quantization`, `backend` and `device` are empty until the engine is ready, `parameters` (how many weights the
    model has) and `context_length` (tokens) are 0 until then. `tokens_per_s` and `first_token_s` are of the reply
    in progress or the last one (None: not known yet). `context_used` None: not known."""

    phase: Phase = Phase.STARTING
    model: str = ""
    quantization: str = ""
    backend: str = ""
    device: str = ""
    parameters: int = 0
    done: int = 0
    total: int = 0
    cached: int = 0
    searching: str = ""
    seconds_left: float | None = None
    elapsed_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    context_used: int | None = None
    context_length: int = 0
