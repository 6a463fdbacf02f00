"""One engine of a comparison and its answer, folded from its events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.cli.progress import describe
from engine.measure.memory import resident_memory
from engine.protocol.events import (
    Event,
    Failed,
    Finished,
    Loading,
    Prefilling,
    Ready,
    Seeing,
    Token,
    Warming,
    decode_rate,
    shown_prefill_rate,
)
from widgets.dashboard.comparison_data import EngineAnswer
from widgets.text import counted

_END_STATES = {"stop": "done", "length": "done, cut at the limit", "cancelled": "stopped"}


class Side:
    """`pid` is the engine's process (None: not on this machine), `device_bytes` what it holds in the device's memory,
    `copy_gbps` the device's copy bandwidth in 10^9 bytes/s (0: not known)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: Ready | None = None
        self.problem = ""
        self.pid: int | None = None
        self.device_bytes = 0
        self.copy_gbps = 0.0
        self.tokens: list[Token] = []
        self._state = ""
        self._is_busy = False
        self._text = ""
        self._prompt_tokens = 0
        self._end: Finished | None = None
        self._peak_bytes: int | None = None

    def start(self) -> None:
        """The engine starts."""
        self.problem, self._state, self._is_busy = "", "starting", True

    def reset(self, prompt_tokens: int = 0) -> None:
        """Drops the last answer. `prompt_tokens`: the length of the prompt that this engine will answer, 0 if there is
        none yet."""
        self.tokens, self._text, self._end, self._prompt_tokens = [], "", None, prompt_tokens
        if self.ready:
            self._is_busy = False
            self.problem, self._state = "", "its turn comes" if prompt_tokens else "ready"

    def wait_for(self, other: str) -> None:
        """Its turn comes when `other` is ready."""
        self._state = f"waits for {other}"

    async def follow(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """`events`, the engine's answer, as they are observed."""
        self._state, self._is_busy = "reading the prompt", True
        async with aclosing(events):
            async for event in events:
                self.observe(event)
                yield event

    def skip(self) -> None:
        """The user stopped the answers. If this one had not begun, it never will."""
        if self.ready and not self._end and not self.problem:
            self._state = "not asked"

    @property
    def doing(self) -> str:
        """What the engine is working on, after its name; "" while it is idle."""
        if not self._is_busy:
            return ""
        count = f" · {counted(len(self.tokens), 'token')}" if self.tokens else ""
        return f"{self.name}: {self._state}{count}"

    def observe(self, event: Event) -> None:
        """Takes an event of the engine."""
        self._is_busy = not isinstance(event, Ready | Finished | Failed)
        match event:
            case Ready():
                self.ready, self._state, self.problem = event, "ready", ""
            case Loading() | Warming() | Seeing() | Prefilling():
                self._state = describe(event)
            case Token():
                self.tokens.append(event)
                self._text += event.text
                self._state = "answering"
            case Finished():
                self._end = event
                self._state = _END_STATES[event.reason]
            case Failed():
                self.problem = f"{event.message} {event.hint}".strip()
                self._state = ""
                if event.request_id is None:
                    self.ready = None

    def view(self, same: int | None, model: Ready | None) -> EngineAnswer:
        """`same`: how many tokens both engines have in common (None: all so far). `model`: the `Ready` of ours."""
        decode, first_token_s, prefill = self._rates()
        mean_position = self._prompt_tokens + len(self.tokens) / 2
        gbps = model.bytes_per_token(mean_position) * (decode or 0) / 1e9 if model else 0.0
        if memory := resident_memory(self.pid):
            self._peak_bytes = memory.peak_bytes + self.device_bytes
        about = (self.ready.backend, self.ready.device_name) if self.ready else ()
        return EngineAnswer(
            name=self.name,
            about=" ".join(part for part in about if part and part != self.name),
            state=self._state,
            text=self._text,
            same=len(self._text) if same is None else sum(len(token.text) for token in self.tokens[:same]),
            problem=self.problem,
            prompt_tokens=self._prompt_tokens,
            tokens=self._end.predicted_n if self._end else len(self.tokens),
            first_token_s=first_token_s,
            prefill=prefill,
            decode=decode,
            gbps=gbps or None,
            share=gbps / self.copy_gbps if gbps and self.copy_gbps else None,
            memory_bytes=self._peak_bytes,
        )

    def _rates(self) -> tuple[float | None, float | None, float | None]:
        """Decode speed in tokens/s, time to the first token in seconds, prefill speed in tokens/s."""
        if self._end and self._end.predicted_n:
            end = self._end
            return (
                decode_rate(end.predicted_n, end.predicted_ms) or None,
                end.prompt_ms / 1e3,
                shown_prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms - end.pictures_ms),
            )
        first_ms, last_ms = (self.tokens[0].at_ms, self.tokens[-1].at_ms) if self.tokens else (None, None)
        if first_ms is None or last_ms is None:
            return None, None, None
        return (
            decode_rate(len(self.tokens), last_ms - first_ms) or None,
            first_ms / 1e3,
            shown_prefill_rate(self._prompt_tokens, 0, first_ms),
        )
