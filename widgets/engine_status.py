"""The state of an engine, as the screen shows it."""

from dataclasses import dataclass
from enum import Enum

from engine.protocol.events import ModelInfo, Ready

NOT_READY = Ready(
    model=ModelInfo(
        name="", architecture="", quantization="", parameters=0, file_bytes=0, trained_context=0, thinks=False
    ),
    backend="",
    device_name="",
    context_length=0,
    load_ms=0.0,
)
"""What is known of an engine before it is ready."""
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
    the product whose fastest kernel is searched ("": no search). `looking_at` says that a picture is encoded, or
    kernels are prepared for it, of which `done` of `total` are parts ("": none).

    `ready` is what the engine said of itself; until then, `expected` is the name of its model's file. `context_length`
    (tokens), `cache_bytes` (what the KV cache takes in memory) and `kv` (its format) may be known while it loads.
    `tokens`, `tokens_per_s` and `first_token_s` are of the reply in progress or the last one. None: not known."""

    phase: Phase = Phase.STARTING
    ready: Ready = NOT_READY
    expected: str = ""
    done: int = 0
    total: int = 0
    cached: int = 0
    searching: str = ""
    looking_at: str = ""
    seconds_left: float | None = None
    elapsed_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    context_used: int | None = None
    context_length: int = 0
    cache_bytes: int = 0
    kv: str = ""

    @property
    def model_name(self) -> str:
        return self.ready.model.title or self.expected

    @property
    def is_nearly_full(self) -> bool:
        """Whether little is left of the context."""
        return (self.context_used or 0) >= NEARLY_FULL * self.context_length > 0
