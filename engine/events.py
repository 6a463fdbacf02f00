"""Everything that crosses the boundary between a user interface and an engine: plain, typed, immutable.

Commands go to the engine, events come back. On the pipe each travels as MessagePack with its class name as
the tag (`encode`, `command_decoder`, `event_decoder`). Every engine speaks the same events, so that a user
interface can tell engines apart only by name.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import EXIT_CODES, FailureKind, OrinError, one_line

Role = Literal["system", "user", "assistant"]
StopReason = Literal["stop", "length", "cancelled"]
KernelPath = Literal["auto", "fused", "graph"]
Step = Literal["decode", "prefill"]
KernelRole = Literal[
    "embedding", "QKV projection", "attention", "attention output", "FFN gate+up", "FFN down", "output head",
    "norm", "element-wise", "sampling", "copy",
]  # fmt: skip
MESSAGE_CHARS = 500  # the longest message or hint of a failure


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frozen, keyword-only, tagged with its class name."""


# --- what a request is made of -------------------------------------------------------------------------


class Message(_Record, frozen=True, kw_only=True, tag=True):
    """One turn of a conversation. `thinking` is what the model thought before `content`, if it did."""

    role: Role
    content: str
    thinking: str = ""


class Chat(_Record, frozen=True, kw_only=True, tag=True):
    """A conversation, for the model's chat template. `think` asks a thinking model to think or not."""

    messages: tuple[Message, ...]
    think: bool = True


class RawText(_Record, frozen=True, kw_only=True, tag=True):
    """Text given to the model as it is: no template; special tokens in it are plain text."""

    text: str


class TokenIds(_Record, frozen=True, kw_only=True, tag=True):
    """Token ids given to the model as they are."""

    ids: tuple[int, ...]


class Sampling(_Record, frozen=True, kw_only=True, tag=True):
    """How a token is drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and
    `repeat_penalty` 1 switch that step off. `seed` None draws one, reported in `Finished`."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None


class Matvec(_Record, frozen=True, kw_only=True, tag=True):
    """How tinygrad's heuristic cuts a matrix-vector product: its MV_BLOCKSIZE, MV_THREADS_PER_ROW and
    MV_ROWS_PER_THREAD."""

    block_size: int = 4
    threads_per_row: int = 8
    rows_per_thread: int = 4


class EngineOptions(_Record, frozen=True, kw_only=True, tag=True):
    """What an engine is started with; fixed for the life of its process. `backend` is a tinygrad device
    ("CPU", "CUDA", "NV") or "auto"; `context_length` None takes the model's own, bounded by memory.

    `kernels`: "fused" are quantized kernels of our own, "graph" plain tensor graphs that tinygrad schedules,
    "auto" what suits the device. `search_width` is the width of the search for faster kernels in the captured steps
    (JITBEAM): on "graph" it is tinygrad's own, on "fused" ours for the products of a decode step. `matvec` is
    tinygrad's heuristic. On "graph", None leaves both to the environment. `search_s` bounds our search in seconds
    (None: by its width); `search_again` repeats a search whose result is known from an earlier start. `keep_packed`
    keeps a CPU's packed weights on disk for the next start."""

    model_path: str
    backend: str = "auto"
    context_length: int | None = None
    kernels: KernelPath = "auto"
    search_width: int | None = None
    matvec: Matvec | None = None
    search_s: float | None = None
    search_again: bool = False
    keep_packed: bool = False


# --- commands ------------------------------------------------------------------------------------------


class Load(_Record, frozen=True, kw_only=True, tag=True):
    options: EngineOptions


class Generate(_Record, frozen=True, kw_only=True, tag=True):
    """Answer `prompt`. `max_tokens` None goes on until the model stops or the context is full.
    `logprobs` N > 0 adds to each token its log-probability and the N most probable, before sampling changes
    them. For measurements, `ignore_eos` goes on past an end-of-turn token, and `fresh` computes the whole
    prompt, whatever of it is in the KV cache."""

    request_id: int
    prompt: Chat | RawText | TokenIds
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    logprobs: int = 0
    ignore_eos: bool = False
    fresh: bool = False


class Measure(_Record, frozen=True, kw_only=True, tag=True):
    """Measure what the figures of answers are held against; waits for the answers asked for before."""

    request_id: int


class Profile(_Record, frozen=True, kw_only=True, tag=True):
    """Time each kernel of a step by itself. Waits for the answers asked for before, and gives way to one that
    is asked for meanwhile."""

    request_id: int
    step: Step = "decode"


class Cancel(_Record, frozen=True, kw_only=True, tag=True):
    request_id: int


class Shutdown(_Record, frozen=True, kw_only=True, tag=True):
    pass


Command = Load | Generate | Measure | Profile | Cancel | Shutdown


# --- events --------------------------------------------------------------------------------------------


class ModelInfo(_Record, frozen=True, kw_only=True, tag=True):
    """What a file says of itself. `quantization` is its file type ("Q4_K_M"), else the type of most bytes."""

    name: str
    architecture: str
    quantization: str
    parameters: int
    file_bytes: int
    trained_context: int
    thinks: bool


class Loading(_Record, frozen=True, kw_only=True, tag=True):
    done_bytes: int
    total_bytes: int


class Search(_Record, frozen=True, kw_only=True, tag=True):
    """A search for the fastest way to compute `what` (a product, in words). `tried` of about `total` candidates were
    timed, `refused` of them failed or gave other results. A decode step took `before_us` and takes `after_us` with
    the best of them, which is `choice`. `found`: it was known from an earlier run. `left_s` is how long the search
    may go on, for all that is still to be searched."""

    what: str
    choice: str
    tried: int
    total: int
    refused: int
    before_us: float
    after_us: float
    left_s: float
    found: bool = False


class Warming(_Record, frozen=True, kw_only=True, tag=True):
    """Kernels being prepared: `done` of about `total` (0 where unknown); in a search, products searched. `cached` of
    them were known from an earlier run."""

    done: int
    total: int
    cached: int = 0
    search: Search | None = None


class Ready(_Record, frozen=True, kw_only=True, tag=True):
    """The engine can answer. `context_length` in tokens; `load_ms` from the start of loading to this event.
    `warnings` are sentences on what in the model was not as expected. A decode step must
    read `weight_bytes_per_token` and, for each token before it, `kv_bytes_per_token` (0: not known)."""

    model: ModelInfo
    backend: str
    device_name: str
    context_length: int
    load_ms: float
    warnings: tuple[str, ...] = ()
    weight_bytes_per_token: int = 0
    kv_bytes_per_token: int = 0


class Prefilling(_Record, frozen=True, kw_only=True, tag=True):
    """`done` of `total` prompt tokens are in the KV cache; `cached` of them were there from earlier turns."""

    request_id: int
    done: int
    total: int
    cached: int


class TopToken(_Record, frozen=True, kw_only=True, tag=True):
    id: int
    logprob: float


class Token(_Record, frozen=True, kw_only=True, tag=True):
    """One token of the answer. `text` is what it completes: possibly empty (part of a character, or a special
    token), never half a character. Log-probabilities are natural, from the unchanged logits. `at_ms` is when
    it was there, by the engine's clock, counted from when the engine took up the request (None: not told).
    `id` is -1 where a server does not tell it."""

    request_id: int
    id: int
    text: str
    logprob: float | None = None
    top: tuple[TopToken, ...] = ()
    at_ms: float | None = None


class Thinking(Token, frozen=True, kw_only=True, tag=True):
    """One token of a thinking span, its opening and closing marks included (their `text` is empty)."""


class Finished(_Record, frozen=True, kw_only=True, tag=True):
    """The end of an answer. `prompt_ms` is the time to the first token, `predicted_ms` the time from there to
    the last, so that the decode rate is (predicted_n - 1) / predicted_ms. `predicted_n` counts the
    end-of-turn token; `prompt_n` counts all prompt tokens, of which `cached_n` were in the KV cache."""

    request_id: int
    reason: StopReason
    prompt_n: int
    cached_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    load_ms: float
    seed: int

    @property
    def context_used(self) -> int:
        """How many tokens the KV cache holds: all but the last one, which none follows that would look at it."""
        return self.prompt_n + max(self.predicted_n - 1, 0)


class Measured(_Record, frozen=True, kw_only=True, tag=True):
    """The answer to `Measure`. `copy_gbps` is the bandwidth of a copy in the device's memory, bytes read and
    bytes written, in 10^9 bytes a second (on a CPU, of reading alone: see `engine.measure.bandwidth`);
    `kernels_per_token` counts the launches of a decode step;
    `device_bytes` is what the engine holds in the device's memory."""

    request_id: int
    copy_gbps: float
    kernels_per_token: int
    device_bytes: int


class KernelTime(_Record, frozen=True, kw_only=True, tag=True):
    """Kernels of a step with one name and role. `total_us` of all its `calls`, by the device's clock where it
    has one; `bytes` is what they must read and write. `source` is what was compiled, `options` how the loops
    were cut (both may be empty)."""

    name: str
    role: KernelRole
    calls: int
    total_us: float
    bytes: int
    source: str = ""
    options: tuple[str, ...] = ()


class KernelProfile(_Record, frozen=True, kw_only=True, tag=True):
    """The answer to `Profile`: a step of `tokens` tokens (1 in decode) at `position`, kernel by kernel.
    `wall_us` is what the whole step takes as it runs in an answer: what the sum of its kernels falls short of
    it is launch gaps. All times are medians of `rounds`."""

    request_id: int
    step: Step
    position: int
    tokens: int
    kernels: tuple[KernelTime, ...]
    wall_us: float
    rounds: int


class Counter(_Record, frozen=True, kw_only=True, tag=True):
    """One figure of the machine: `value` in `unit`, at most `most` where that is known, or a `text`; neither
    where it cannot be had, and `absent` says why. `parts` are what it is made of (rails, zones)."""

    name: str
    value: float | None = None
    unit: str = ""
    most: float | None = None
    text: str = ""
    absent: str = ""
    parts: tuple[str, ...] = ()


class Failed(_Record, frozen=True, kw_only=True, tag=True):
    """What was asked for did not work. `request_id` None: the engine itself (it did not start, or died)."""

    kind: FailureKind
    message: str
    hint: str = ""
    request_id: int | None = None

    @classmethod
    def from_error(cls, error: Exception, request_id: int | None = None) -> Failed:
        """The event for any exception. Its text is printable, on one line."""
        if isinstance(error, OrinError):
            kind, message, hint = error.kind, error.message, error.hint
        elif isinstance(error, MemoryError):
            kind, message = "backend", "There is not enough memory for this model and context."
            hint = "Choose a smaller model or a shorter context."
        else:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            kind, message, hint = "internal", f"The engine failed: {text}", ""
        return cls(
            kind=kind,
            message=one_line(message, MESSAGE_CHARS),
            hint=one_line(hint, MESSAGE_CHARS),
            request_id=request_id,
        )

    @property
    def exit_code(self) -> int:
        """What a command returns that this failure ends."""
        return EXIT_CODES[self.kind]


Event = (
    Loading | Warming | Ready | Prefilling | Token | Thinking | Finished | Measured | KernelProfile | Failed
)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def decode_rate(predicted_n: int, predicted_ms: float) -> float:
    """Decode speed in tokens per second: (n - 1) / t, since the first token belongs to the prompt.
    0 where there is none."""
    return (predicted_n - 1) / predicted_ms * 1e3 if predicted_n > 1 and predicted_ms > 0 else 0.0


def prefill_rate(prompt_n: int, cached_n: int, prompt_ms: float) -> float:
    """Prefill speed in tokens per second: prompt tokens computed / time to first token; 0 without one."""
    return (prompt_n - cached_n) / prompt_ms * 1e3 if prompt_ms > 0 else 0.0
