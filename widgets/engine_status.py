"""The state of an engine, as the screen shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NEARLY_FULL = 0.8
"""The share of a context from which on it is nearly full."""


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
    """`done` of `total` (0: not known) are bytes while loading, kernels while warming, products while searching and
    prompt tokens while prefilling. `cached` of the kernels or products were known from an earlier run. `searching` is
    the product whose fastest kernel is searched ("": no search).

    `model`, `quantization`, `backend` and `device` are "" before the engine is ready, `parameters` (weights) is 0.
    `context_length` (tokens), `cache_bytes` (what the KV cache takes in memory) and `kv` (its format) may be known
    while it loads. `states_bytes` is what recurrent states take with up to `checkpoints` copies (0: it has none).
    `takes_effort`: the chat template reads how much the model should think. `tokens`, `tokens_per_s`
    and `first_token_s` are of the reply in progress or the last one. None: not known.
    `keep_warm_s`: how long the engine will live on after the program."""

    phase: Phase = Phase.STARTING
    model: str = ""
    quantization: str = ""
    backend: str = ""
    device: str = ""
    parameters: int = 0
    takes_effort: bool = False
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
    cache_bytes: int = 0
    kv: str = ""
    states_bytes: int = 0
    checkpoints: int = 0
    keep_warm_s: float = 0.0

    @property
    def is_nearly_full(self) -> bool:
        """Whether little is left of the context."""
        return (self.context_used or 0) >= NEARLY_FULL * self.context_length > 0
