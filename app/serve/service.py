"""What the routes share: the engine, what its model file says, and the requests that are open."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from msgspec.structs import replace

from app.serve.answer import Answer, Begun, Delta, End, Part, answer_parts
from app.serve.errors import ApiError, unavailable
from app.serve.metrics import Metrics
from engine.events import Event, Finished, Generate, Ready, Sampling
from engine.formats.gguf import GGUF
from engine.formats.tokenizer import Tokenizer
from engine.formats.tool_calls import ToolForm, tool_form

CLIENT_GONE = 499  # nginx's status of a request whose client did not wait
MAX_RETRY_S = 60


class ServedEngine(Protocol):
    """What the server needs of an engine: answers to several requests at the same time."""

    def generate(self, request: Generate) -> AsyncGenerator[Event, None]: ...


@dataclass(frozen=True)
class ModelFile:
    """What the server itself reads of a model file. `form` is how the model calls tools."""

    tokenizer: Tokenizer
    form: ToolForm | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Takes about a second. Raises ModelFileError."""
        with GGUF(path) as file:
            return cls(Tokenizer(file), tool_form(file.get("tokenizer.chat_template", str, "")))


@dataclass(frozen=True)
class Handled:
    """A request for a completion has ended. `finished` is None if there was no answer, or no end of it; `error` is the
    type of the error then. It holds nothing of what was asked and said."""

    client: str
    path: str
    status: int
    seconds: float
    finished: Finished | None = None
    error: str = ""


@dataclass
class Service:
    """`sampling` and `think` hold where a request does not say otherwise. Requests beyond `parallel` wait,
    `max_waiting` of them at most. `on_handled` may be set to a function; it gets every `Handled`."""

    engine: ServedEngine
    model: str
    file: ModelFile
    sampling: Sampling = Sampling()  # noqa: RUF009 (immutable)
    think: bool = True
    parallel: int = 1
    max_waiting: int = 32
    ready: Ready | None = None
    stopping: bool = False
    on_handled: Callable[[Handled], object] = lambda _: None
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    open: int = 0  # requests that the engine has, and that have not ended
    processing: int = 0  # those of them that it has begun with

    @property
    def waiting(self) -> int:
        return self.open - self.processing

    def check_ready(self) -> None:
        """Raises ApiError while the engine cannot answer."""
        if self.stopping:
            raise unavailable("The server is stopping.")
        if self.ready is None:
            raise unavailable("Loading model")

    async def parts(self, exchange: Exchange, answer: Answer) -> AsyncGenerator[Part, None]:
        """The parts of an answer. Closing them early cancels the request. Raises ApiError."""
        self.check_ready()
        if self.open >= self.parallel + self.max_waiting:
            message = f"The server has {self.parallel} requests at work and {self.waiting} waiting."
            headers = {"Retry-After": str(self._retry_s())}
            raise ApiError(429, message, "rate_limit_error", code="too_many_requests", headers=headers)
        begun = False
        self.open += 1
        try:
            request = replace(answer.request, client=exchange.client)
            async with aclosing(answer_parts(answer, self.engine.generate(request))) as parts:
                async for part in parts:
                    if isinstance(part, Begun):
                        begun = True
                        self.processing += 1
                    exchange.note(part)
                    yield part
        finally:
            self.open -= 1
            self.processing -= begun

    def _retry_s(self) -> int:
        """When a place may be free: the mean time of an answer, for each that waits."""
        seconds = self.metrics.answers.mean * (self.waiting + 1) / self.parallel
        return min(max(math.ceil(seconds), 1), MAX_RETRY_S)


@dataclass
class Exchange:
    """A request for a completion, from its arrival to its end."""

    service: Service
    client: str
    path: str
    _started: float = field(default_factory=time.perf_counter)
    _first_token_s: float = 0.0
    _finished: Finished | None = None
    _closed: bool = False

    def note(self, part: Part) -> None:
        match part:
            case Delta():
                self._first_token_s = self._first_token_s or self._seconds
            case End():
                self._finished = part.finished

    def close(self, status: int, error: str = "") -> None:
        """Counts the request and reports it, once."""
        if self._closed:
            return
        self._closed = True
        if not error and self._finished is None:
            status = CLIENT_GONE
        metrics = self.service.metrics
        metrics.requests[status] += 1
        if self._finished:
            metrics.answered(self._finished, self._first_token_s or self._seconds, self._seconds)
        handled = Handled(self.client, self.path, status, self._seconds, self._finished, error)
        self.service.on_handled(handled)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started
