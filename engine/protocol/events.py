"""All messages between a user interface and an engine, as immutable records: commands to the engine, events from it.

Between processes a record is encoded as MessagePack, with its class name as the tag (`encode`, `command_decoder`,
`event_decoder`). All engines send the same events. `--json` prints events under these names.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engine.errors import EXIT_CODES, ContextFullError, FailureKind, described, one_line
from engine.protocol.conversation import PICTURE_MARK as PICTURE_MARK
from engine.protocol.conversation import Chat as Chat
from engine.protocol.conversation import Message as Message
from engine.protocol.conversation import Picture as Picture
from engine.protocol.conversation import RawText as RawText
from engine.protocol.conversation import Record as _Record
from engine.protocol.conversation import Role as Role
from engine.protocol.conversation import TokenIds as TokenIds
from engine.protocol.conversation import ToolCall as ToolCall
from engine.protocol.conversation import plain as plain
from engine.protocol.measurement import KernelProfile as KernelProfile
from engine.protocol.measurement import KernelRole as KernelRole
from engine.protocol.measurement import KernelTime as KernelTime
from engine.protocol.measurement import Measure as Measure
from engine.protocol.measurement import Measured as Measured
from engine.protocol.measurement import Profile as Profile
from engine.protocol.measurement import Step as Step
from engine.protocol.search import Search as Search
from engine.protocol.search import Tune as Tune
from engine.protocol.search import Tuned as Tuned

StopReason = Literal["stop", "length", "cancelled"]
Effort = Literal["low", "medium", "high"]
KernelPath = Literal["auto", "fused", "graph"]
ContextLength = Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)] | Literal["max"] | None
"""Tokens. "max": as many as the model was trained for and memory has room for. None: the model's own, up to 8192."""
Speculate = Literal["auto", "off", "lookup", "heads", "draft"]
Pooling = Literal["mean", "cls", "last", "rank"]
"""What an embedding is made of: the mean over all tokens, the first or the last of them; or the classes of a model that
ranks documents, by the last one."""
MESSAGE_CHARS = 500  # of a failure's message, and of its hint
TOKEN_GAP = 2.0  # how many times as long a step may take that reads prompts, unless said otherwise
MIN_TOKENS = 32  # the prefill rate of fewer new tokens is not shown, and no speed of fewer is recorded


class Sampling(_Record, frozen=True, kw_only=True):
    """How a token is drawn. `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and 0 for
    the other penalties turn their step off. `seed` None takes a random seed; `Finished` reports it (0: a server's own).
    `effort` is how much to think, if the chat template reads it (`ModelInfo.takes_effort`); None leaves it to the
    template."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    effort: Effort | None = None


class Grammar(_Record, frozen=True, kw_only=True):
    """What an answer may be: JSON that a schema describes, or a text of a Lark grammar, as the library llguidance reads
    them. Thinking before the answer is free, unless the kind is "reply": then the grammar is of the whole reply.
    `ends_numbers`: digits of a number have an end, which neither JSON nor such a grammar sets; not where a client wrote
    the grammar itself."""

    kind: Literal["json_schema", "lark", "reply"]
    source: str
    ends_numbers: bool = True


class Matvec(_Record, frozen=True, kw_only=True):
    """How tinygrad's heuristic splits a matrix-vector product: its MV_BLOCKSIZE and the like."""

    block_size: int = 4
    threads_per_row: int = 8
    rows_per_thread: int = 4


class EngineOptions(_Record, frozen=True, kw_only=True):
    """The options of an engine, fixed for the life of its process. `backend` is "auto" or a tinygrad device.

    `kernels`: "fused" are quantized kernels of our own, "graph" plain tensor graphs that tinygrad schedules, "auto"
    takes what suits the device. With `context_at_most`, a model that was trained for less than `context_length` has
    that in its place, and else it is refused. `search_width` is the width of the search for faster kernels in the
    captured steps (JITBEAM): on "graph" tinygrad's own, on "fused" ours for the products of a decode step. `matvec` is
    tinygrad's heuristic. On "graph", None leaves both to the environment. `search_s` bounds our search (None: by its
    width); `search_again` repeats one whose result is known. `keep_packed` keeps a CPU's packed weights on disk for the
    next start. `parallel` conversations are answered at once, each with its own context, if the device's kernels can.
    `kv` names the format of the KV cache (`engine.formats.kv_format`). `prefix_cache_bytes` limits what is kept on disk
    of the KV cache of long conversations (None: what the disk has room for). `token_gap`, 1 or more, bounds the time
    between two tokens of a reply while prompts are read, as a multiple of that without. `speculate`: who guesses next
    tokens (`engine.runtime.speculation`). `mmproj` is the file of the encoder with which the model sees pictures,
    `draft` that of a draft model, and `lora` those of adapters (`engine.loading.adapters`; "": none). `chip`: "sm_87"
    takes the kernels of such GPUs on CUDA ("": its own)."""

    model_path: str
    backend: str = "auto"
    context_length: ContextLength = None
    context_at_most: bool = False
    kernels: KernelPath = "auto"
    search_width: int | None = None
    matvec: Matvec | None = None
    search_s: float | None = None
    search_again: bool = False
    keep_packed: bool = False
    parallel: int = 1
    kv: str = "f16"
    prefix_cache_bytes: int | None = 0
    token_gap: float = TOKEN_GAP
    speculate: Speculate = "auto"
    mmproj: str = ""
    draft: str = ""
    lora: str = ""
    chip: str = ""


# --- commands ------------------------------------------------------------------------------------------


class Load(_Record, frozen=True, kw_only=True):
    options: EngineOptions


class Generate(_Record, frozen=True, kw_only=True):
    """Answer `prompt`. `max_tokens` None: until the model stops or the context is full. `logprobs` N > 0 adds to each
    token its log-probability and the N most probable tokens, before sampling changes them. `grammar` allows only tokens
    that begin a text which fits it; without one, a reply has at least `min_tokens`. A reply begins with the tokens
    `forced`. `logit_bias` is added to the logits of tokens, by id; unknown ids are ignored. To measure: `ignore_eos`
    continues after an end-of-turn token, `fresh` computes the whole prompt, without `guesses` each token has a step.
    `client` names who asks: they take turns (`engine.protocol.fairness`). With `pooling`, there is no reply, but
    `Embedded`."""

    request_id: int
    prompt: Chat | RawText | TokenIds
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int = 0
    ignore_eos: bool = False
    fresh: bool = False
    guesses: bool = True
    client: str = ""
    connection: int = 0
    grammar: Grammar | None = None
    forced: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    pooling: Pooling | None = None


class Cancel(_Record, frozen=True, kw_only=True):
    request_id: int


class Shutdown(_Record, frozen=True, kw_only=True): ...


Request = Generate | Measure | Profile | Tune
Command = Load | Request | Cancel | Shutdown


# --- events --------------------------------------------------------------------------------------------


class ModelInfo(_Record, frozen=True, kw_only=True):
    """The metadata of a model file. `quantization` is its file type ("Q4_K_M"), else the type that takes most bytes.
    `trained_context` is in tokens. `thinks`: the chat template supports thinking. `takes_effort`: it reads how much.
    `sees`: an encoder is loaded, so that messages may have pictures. `adapters`: names of those that change its
    weights (LoRA), with their scales unless these are 1."""

    name: str
    architecture: str
    quantization: str
    parameters: int
    file_bytes: int
    trained_context: int
    thinks: bool
    takes_effort: bool = False
    sees: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name, with those of its adapters."""
        return " + ".join((self.name, *self.adapters))


class Loading(_Record, frozen=True, kw_only=True):
    """`done_bytes` of the model's weights are loaded. `cache_bytes` is what the KV cache takes in memory for a context
    of `context_length` tokens (0: not known), in the format `kv`."""

    done_bytes: int
    total_bytes: int
    context_length: int = 0
    cache_bytes: int = 0
    kv: str = ""


class Warming(_Record, frozen=True, kw_only=True):
    """Kernels are prepared: `done` of about `total` (0: not known; in a search, products), `cached` by earlier runs."""

    done: int
    total: int
    cached: int = 0
    search: Search | None = None


class Span(_Record, frozen=True, kw_only=True):
    """A part of the engine's start, since its process began. Spans may overlap."""

    name: str
    start_ms: float
    took_ms: float


class Ready(_Record, frozen=True, kw_only=True):
    """The engine can answer. `context_length` is in tokens, `cache_bytes` what its KV cache takes in memory (0: not
    known) in the format `kv` ("": not known), `load_ms` the time from the start of loading. `is_squeezed`: "max" was
    asked for, and memory has no room for the context that the model was trained for. `warnings` are sentences about
    unexpected things in the model. `parallel` conversations are answered at a time. A decode step reads
    `weight_bytes_per_token`, `kv_bytes_per_token` for each token before it (0: not known), `window_kv_bytes_per_token`
    for each in the sliding `window`, and the recurrent state, `state_bytes` (0: none). States with up to `checkpoints`
    copies take `states_bytes`. If the engine reports `ExpertChoices`, each layer of experts has `experts`, and
    `experts_used` compute a token. `start`: what the engine's process did. It outlives its client by `keep_warm_s`.
    `unheeded` are options of `Sampling` that have no effect: a server's protocol has no place for them."""

    model: ModelInfo
    backend: str
    device_name: str
    context_length: int
    load_ms: float
    cache_bytes: int = 0
    kv: str = ""
    is_squeezed: bool = False
    warnings: tuple[str, ...] = ()
    parallel: int = 1
    weight_bytes_per_token: int = 0
    kv_bytes_per_token: int = 0
    window: int = 0
    window_kv_bytes_per_token: int = 0
    state_bytes: int = 0
    states_bytes: int = 0
    checkpoints: int = 0
    experts: int = 0
    experts_used: int = 0
    start: tuple[Span, ...] = ()
    keep_warm_s: float = 0.0
    unheeded: tuple[str, ...] = ()

    @property
    def is_on_cpu(self) -> bool:
        return self.backend.startswith("CPU")

    def bytes_per_token(self, position: float) -> float:
        """What a decode step reads after `position` tokens; 0 if the engine does not know its weights."""
        if not self.weight_bytes_per_token:
            return 0
        windows = min(position, self.window) * self.window_kv_bytes_per_token
        return self.weight_bytes_per_token + self.state_bytes + position * self.kv_bytes_per_token + windows


class Seeing(_Record, frozen=True, kw_only=True):
    """The one at `index` of the prompt's `pictures` becomes `tokens` tokens: `done` of `total` parts of the encoder's
    work on it are done, or while it `compiles`, of the kernels for pictures of its size. Comes before its tokens are
    read, at most four times a second while a picture is encoded, and for each picture once with `done` equal to
    `total`, also if nothing was to be computed for it."""

    request_id: int
    index: int
    pictures: int
    tokens: int
    done: int
    total: int
    compiles: bool = False


class Prefilling(_Record, frozen=True, kw_only=True):
    """`done` of `total` prompt tokens are in the KV cache; `cached` of them are from earlier turns."""

    request_id: int
    done: int
    total: int
    cached: int


class TopToken(_Record, frozen=True, kw_only=True):
    id: int
    logprob: float


class Token(_Record, frozen=True, kw_only=True):
    """One token of the answer. `text` holds the characters that it completes; it is empty for a part of a character and
    for a special token. Log-probabilities are natural logarithms, from the logits before sampling. `at_ms` is the time
    since the engine began with the request (None: not known). `id` is -1 if a server does not send it. `guessed`: a
    step checked it as a guess, and it was right."""

    request_id: int
    id: int
    text: str
    logprob: float | None = None
    top: tuple[TopToken, ...] = ()
    at_ms: float | None = None
    guessed: bool = False


class Thinking(Token, frozen=True, kw_only=True):
    """One token of the model's reasoning. The marks that open and close it are such tokens too, with empty `text`."""


class Embedded(_Record, frozen=True, kw_only=True):
    """The embedding of a prompt, or its probabilities of classes: `values` are float32 numbers, little-endian."""

    request_id: int
    values: bytes


class ExpertChoices(_Record, frozen=True, kw_only=True):
    """How often each expert of each layer was chosen since the event before, also by the tokens of prompts, unless they
    need no experts of the layer. Comes at most once a second while the engine answers, and once at the end."""

    layers: tuple[tuple[int, ...], ...]


class Finished(_Record, frozen=True, kw_only=True):
    """The end of an answer. `cached_n` of the `prompt_n` tokens of its prompt were in the KV cache; `predicted_n` are
    its own, with the end-of-turn token. `prompt_ms` is the time to the first token, and `pictures_ms` its part in which
    pictures were encoded; `predicted_ms` is from there to the last (`decode_rate`). `draft_n_accepted` of `draft_n`
    guesses were right, each of which saved a step; `draft_gain` is how many times as fast the reply was as measured
    steps without guesses (0: there were none)."""

    request_id: int
    reason: StopReason
    prompt_n: int
    cached_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    load_ms: float
    seed: int
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_gain: float = 0.0
    pictures_ms: float = 0.0

    @property
    def context_used(self) -> int:
        """The tokens in the KV cache: all but the last one, which no later token has attended to."""
        return self.prompt_n + max(self.predicted_n - 1, 0)


class Slot(_Record, frozen=True, kw_only=True):
    """A conversation that is answered beside others. `prompt_done` of the `prompt_n` tokens of its prompt are in the KV
    cache; the reply has `predicted_n` tokens so far, `rate` a second."""

    request_id: int
    client: str
    phase: Step
    prompt_done: int
    prompt_n: int
    predicted_n: int
    rate: float


class BlockCounts(_Record, frozen=True, kw_only=True):
    """Blocks of the KV cache: unused, held by conversations that are answered, and kept of earlier ones."""

    free: int
    held: int
    cached: int


class Slots(_Record, frozen=True, kw_only=True):
    """What an engine does that answers several conversations: its slots (None: idle), how many requests are `waiting`
    for one, and the KV cache (one entry for layers that keep all tokens, one for each window). Belongs to no request.
    `device_bytes` is the device memory that the engine holds. `checkpoints` of recurrent states: how many there are,
    and may be. The last step computed `rows`, the next tokens of so many replies, and read `prompt_tokens`, for which
    it had `room` (0: none were due). Comes at most four times a second, and once when the last answer has ended."""

    slots: tuple[Slot | None, ...]
    waiting: int
    blocks: tuple[BlockCounts, ...]
    device_bytes: int = 0
    checkpoints: tuple[int, int] = (0, 0)
    rows: int = 0
    prompt_tokens: int = 0
    room: int = 0


class Counter(_Record, frozen=True, kw_only=True):
    """One figure of the machine: a `value` in `unit`, with its `maximum` if that is known, or a `text`. If it has
    neither, `absent` says why. `parts` are its components in words (power rails, thermal zones)."""

    name: str
    value: float | None = None
    unit: str = ""
    maximum: float | None = None
    text: str = ""
    absent: str = ""
    parts: tuple[str, ...] = ()


class Failed(_Record, frozen=True, kw_only=True):
    """A request failed. `request_id` None: the engine itself failed (it did not start, or it died). `tokens` and `most`
    are those of a ContextFullError."""

    kind: FailureKind
    message: str
    hint: str = ""
    request_id: int | None = None
    tokens: int = 0
    most: int = 0

    @classmethod
    def from_error(cls, error: Exception, request_id: int | None = None) -> Failed:
        """The event of any exception. Its texts are printable, on one line, of at most MESSAGE_CHARS characters."""
        kind, *texts = described(error)
        message, hint = (one_line(text, MESSAGE_CHARS) for text in texts)
        tokens, most = (error.tokens, error.most) if isinstance(error, ContextFullError) else (0, 0)
        return cls(kind=kind, message=message, hint=hint, request_id=request_id, tokens=tokens, most=most)

    @property
    def exit_code(self) -> int:
        """The exit code of a command that fails with it."""
        return EXIT_CODES[self.kind]


Event = (
    Loading | Warming | Ready | Seeing | Prefilling | Token | Thinking | Embedded | ExpertChoices | Finished | Slots
    | Measured | KernelProfile | Tuned | Failed
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def decode_rate(predicted_n: int, predicted_ms: float) -> float:
    """Decode speed in tokens per second: (n - 1) / t, as the first token's time is the prompt's. 0 if n < 2."""
    return (predicted_n - 1) / predicted_ms * 1e3 if predicted_n > 1 and predicted_ms > 0 else 0.0


def prefill_rate(prompt_n: int, cached_n: int, prompt_ms: float) -> float:
    """Prefill speed in tokens per second: computed prompt tokens / time to first token; 0 if that is not known."""
    return (prompt_n - cached_n) / prompt_ms * 1e3 if prompt_ms > 0 else 0.0


def shown_prefill_rate(prompt_n: int, cached_n: int, prompt_ms: float) -> float | None:
    """`prefill_rate` for the screen. None for fewer than `MIN_TOKENS` computed tokens: their time is mostly that of the
    first decode step and of launches, and says little about the speed."""
    return prefill_rate(prompt_n, cached_n, prompt_ms) or None if prompt_n - cached_n >= MIN_TOKENS else None
