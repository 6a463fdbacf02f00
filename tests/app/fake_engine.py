"""An engine in this process that answers from a script: fast, deterministic, no model."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from msgspec.structs import replace

from engine.protocol.events import (
    Chat,
    Embedded,
    EngineOptions,
    Event,
    ExpertChoices,
    Failed,
    Finished,
    Generate,
    KernelProfile,
    KernelTime,
    Loading,
    Measured,
    ModelInfo,
    Prefilling,
    Ready,
    Step,
    Thinking,
    Token,
    Warming,
)

MODEL = ModelInfo(
    name="Qwen3 0.6B",
    architecture="qwen3",
    quantization="Q6_K",
    parameters=751_632_384,
    file_bytes=636_000_000,
    trained_context=40_960,
    thinks=True,
)
READY = Ready(
    model=MODEL,
    backend="CUDA",
    device_name="NVIDIA H200",
    context_length=8192,
    load_ms=1234.0,
    weight_bytes_per_token=490_000_000,
    kv_bytes_per_token=114_688,
)
SEEING = replace(READY, model=replace(MODEL, sees=True))
STARTED: tuple[Event, ...] = (
    Loading(done_bytes=318_000_000, total_bytes=636_000_000),
    Warming(done=12, total=48),
    READY,
)

WITH_EXPERTS = replace(READY, experts=128, experts_used=8)
"""As an engine says whose model has experts."""
CHOICES = ExpertChoices(
    layers=tuple(
        tuple(max(0, 40 - (i * (37 + layer) + 11 * layer) % 53) * (1 + (i == 90)) for i in range(128))
        for layer in range(24)
    )
)


def tokens(text: str, kind: type[Token] = Token, request_id: int = 0) -> Iterator[Token]:
    """`text` in pieces of about the size that models make."""
    for id, start in enumerate(range(0, len(text), 4)):
        yield kind(request_id=request_id, id=id, text=text[start : start + 4])


def reply(text: str, thinking: str = "", **changes: object) -> list[Event]:
    """The events of an answer."""
    pieces = [*tokens(thinking, Thinking), *tokens(text)]
    end = {
        "request_id": 0,
        "reason": "stop",
        "prompt_n": 96,
        "cached_n": 0,
        "prompt_ms": 210.0,
        "predicted_n": len(pieces) + 1,
        "predicted_ms": len(pieces) * 10.0,
        "load_ms": 0.0,
        "seed": 7,
    }
    return [
        Prefilling(request_id=0, done=0, total=96, cached=0),
        Prefilling(request_id=0, done=96, total=96, cached=0),
        *pieces,
        Finished(**{**end, **changes}),  # type: ignore[arg-type]
    ]


def vector_of(*numbers: float) -> list[Event]:
    """The events of an embedding."""
    begun, read, *_, end = reply("", predicted_n=0)
    return [begun, read, Embedded(request_id=0, values=struct.pack(f"<{len(numbers)}f", *numbers)), end]


class FakeEngine:
    """Gives the next of `replies` to each request (the last one again and again). A `None` among the events
    waits until `release()` or `stop()`. `token_s` waits after each token."""

    name = "fake"
    pid = None
    options = EngineOptions(model_path="")

    def __init__(
        self, *replies: Sequence[Event | None], start: Sequence[Event | None] = STARTED, token_s: float = 0.0
    ) -> None:
        self.replies = list(replies) or [reply("Hello.")]
        self.start_events = start
        self.token_s = token_s
        self.requests: list[Generate] = []
        self.closed = 0
        self.on_event: Callable[[Event], object] = lambda _: None
        self.seconds = 1000.0
        self._gate = asyncio.Event()
        self._stopped = asyncio.Event()

    def clock(self) -> float:
        """A clock for the application under test: an event takes 10 ms, whatever the machine."""
        return self.seconds

    def release(self) -> None:
        """Lets the stream that waits at a None go on."""
        self._gate.set()

    def prompts(self) -> list[list[tuple[str, str]]]:
        """What was asked so far: role and content of every message."""
        return [
            [(message.role, message.content) for message in request.prompt.messages]
            for request in self.requests
            if isinstance(request.prompt, Chat)
        ]

    async def start(self) -> AsyncIterator[Event]:
        async for event in self._play(self.start_events):
            yield event

    async def generate(self, request: Generate) -> AsyncIterator[Event]:
        self.requests.append(request)
        self._stopped.clear()
        events = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if request.pooling and None not in events and not any(isinstance(e, Embedded) for e in events):
            events = vector_of(3, 4) if isinstance(events[-1], Finished) else events[-1:]
        async for event in self._play(events):
            yield event

    async def _play(self, events: Sequence[Event | None]) -> AsyncIterator[Event]:
        for event in events:
            self.seconds += 0.01
            if event is None:
                waits = [asyncio.ensure_future(e.wait()) for e in (self._gate, self._stopped)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                self._gate.clear()
            elif isinstance(event, Token):
                await asyncio.sleep(self.token_s)
            if self._stopped.is_set():
                [end] = reply("", reason="cancelled")[2:]
                yield end
                return
            if event is not None:
                self.on_event(event)
                yield event

    async def stop(self) -> None:
        self._stopped.set()

    async def close(self) -> None:
        self.closed += 1


class MeasuredEngine(FakeEngine):
    """A FakeEngine that measures itself, always with the same figures."""

    def __init__(self, *replies: Sequence[Event | None], **options: object) -> None:
        super().__init__(*replies, **options)  # type: ignore[arg-type]
        self.profiles: list[Step] = []

    async def measure(self) -> Measured | Failed:
        return Measured(request_id=0, copy_gbps=120.0, kernels_per_token=143, device_bytes=700_000_000)

    async def profile(self, step: Step = "decode") -> KernelProfile | Failed:
        self.profiles.append(step)
        return profile(step)


def profile(step: Step = "decode") -> KernelProfile:
    """A profile of a step as an engine might give it."""
    scale, tokens = (20.0, 1) if step == "decode" else (190.0, 512)
    kernels = [
        ("qkv_Q6_K_4096x1024", "QKV projection", 28, 62.0, 96_000_000),
        ("attention_16x128", "attention", 28, 91.0, 21_000_000),
        ("o_Q6_K_1024x2048", "attention output", 28, 41.0, 49_000_000),
        ("gate_up_Q6_K_6144x1024", "FFN gate+up", 28, 101.0, 146_000_000),
        ("down_Q6_K_1024x3072", "FFN down", 28, 66.0, 73_000_000),
        ("head_Q6_K_151936x1024", "output head", 1, 44.0, 128_000_000),
        ("embed_1024", "embedding", 1, 2.1, 9_000),
        ("next_token", "sampling", 1, 2.4, 80_000),
    ]
    return KernelProfile(
        request_id=0, step=step, position=400, tokens=tokens, wall_us=500 * scale, rounds=25,
        kernels=tuple(
            KernelTime(
                name=name, role=role, calls=calls, total_us=us * scale, bytes=n_bytes,
                source="void kernel(float* restrict data0) {\n  data0[0] = 1.0f;\n}\n",
                options=("UPCAST axis 0, 4", "LOCAL axis 0, 32"),
            )
            for name, role, calls, us, n_bytes in kernels
        ),
    )  # fmt: skip


DIED = Failed(
    kind="backend", message="The engine process died (signal 9).", hint="The next prompt restarts it."
)
TOO_LONG = Failed(
    kind="context",
    message="The prompt has 9,000 tokens and the context holds 8,192.",
    hint="Shorten it.",
    request_id=1,
    tokens=9000,
    most=8192,
)
