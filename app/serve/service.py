"""What the routes share: the engine, what its model file says, and the requests that are open."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Self

from msgspec.structs import replace

from app.chat.picture_tokens import counting_processor
from app.serve.answer import AnswerBegun, AnswerEnd, Events, Parts, ServedAnswer, merged
from app.serve.errors import ApiError, of_usage, unavailable
from app.serve.http import ClientGoneError
from app.serve.metrics import Metrics
from engine.errors import OrinError, UsageError
from engine.formats.gguf import GGUF
from engine.formats.pooling import pooling_of
from engine.formats.templates.file_templates import FileTemplates, tool_form
from engine.formats.templates.fill_in import FillIn
from engine.formats.templates.template import ChatTemplate, Prompt
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tools.forms import ToolForm
from engine.protocol.client import LocalEngine
from engine.protocol.events import (
    Chat,
    Effort,
    Event,
    Failed,
    Finished,
    Generate,
    Pooling,
    Ready,
    Sampling,
    Slots,
    Token,
)
from engine.protocol.fairness import address_of
from widgets.dashboard.request_list import Handled

CLIENT_GONE = 499  # nginx's status of a request whose client did not wait
MAX_RETRY_S = 60


@dataclass
class ModelFile:
    """What the server itself reads of a model file. `form` is how the model calls tools, `fill_in` how it is asked to
    fill in a text. `pooling` is how its embeddings of so many `dimensions` are made. `mmproj`: its encoder, whose
    pictures are counted."""

    tokenizer: Tokenizer
    form: ToolForm | None
    architecture: str
    templates: FileTemplates
    fill_in: FillIn | None
    pooling: Pooling | None = None
    dimensions: int = 0
    mmproj: str = ""
    _opening: Lock = field(default_factory=Lock)

    @classmethod
    def read(cls, path: Path, mmproj: str = "") -> Self:
        """Takes about a second. Raises ModelFileError."""
        with GGUF(path) as file:
            templates = FileTemplates.of(file)
            architecture = file.get("general.architecture", str, "")
            tokenizer = Tokenizer(file)
            return cls(
                tokenizer,
                tool_form(file),
                architecture,
                templates,
                FillIn.of(file, tokenizer),
                pooling_of(file),
                file.get(f"{architecture}.embedding_length", int, 0),
                mmproj,
            )

    def encoded(self, chat: Chat, effort: Effort | None = None) -> Prompt:
        """A conversation as the model gets it. Takes as long as its text is; the first call starts the process that
        renders templates. Raises ApiError."""
        try:
            with self._opening:
                chats = self._chats
            return chats.encode(chat.messages, think=chat.think, effort=effort, tools=chat.tools)
        except OrinError as error:
            raise ApiError(400, f"{error.message} {error.hint}".strip()) from None

    def rank_prompt(self, query: str, document: str) -> list[int]:
        """What a model that ranks gets of a document. Special tokens are those of the template; without one, they are
        those around a text."""
        tokenizer = self.tokenizer
        if not self.templates.rank:
            end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
            begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
            between = end if tokenizer.wordpiece else 2 * end  # as BERT has it, and as RoBERTa
            return [*begin, *tokenizer.encode(query), *between, *tokenizer.encode(document), *end]
        texts = {"{query}": query, "{document}": document}
        parts = re.split(r"(\{query\}|\{document\})", self.templates.rank)
        return self.tokenizer.encode_segments((texts.get(part, part), part not in texts) for part in parts)

    @cached_property
    def _chats(self) -> ChatTemplate:
        sources = self.templates
        template = ChatTemplate(sources.chat or None, self.architecture, self.tokenizer, sources.tools)
        template.picture_processor = counting_processor(Path(self.mmproj)) if self.mmproj else None
        return template


async def _at_once() -> None:
    pass


@dataclass
class Service:
    """`sampling` and `think` hold where a request does not say otherwise. Requests beyond `parallel` wait,
    `max_waiting` of them at most, and as many again of clients that have no other. `on_handled` gets every request that
    has ended, and `watch` the events of every answer, which it passes on. `make_room` waits until the engine may be
    loaded, and `on_ended` hears that requests have ended."""

    engine: LocalEngine
    model: str
    file: ModelFile
    sampling: Sampling = Sampling()  # noqa: RUF009 (immutable)
    think: bool = True
    parallel: int = 1
    max_waiting: int = 32
    ready: Ready | None = None
    stopping: bool = False
    on_handled: Callable[[Handled], object] = lambda _: None
    watch: Callable[[Generate, Events], Events] = lambda _, events: events
    make_room: Callable[[], Awaitable[None]] = _at_once
    on_ended: Callable[[], object] = lambda: None
    shown_name: str = ""  # among several models
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    slots: Slots | None = None
    open: int = 0  # requests that the engine has, and that have not ended
    processing: int = 0  # those of them that it has begun with
    _open_by: Counter[str] = field(default_factory=Counter)  # how many answers each address has open

    @property
    def context_length(self) -> int:
        """In tokens; 0 while the model is not loaded."""
        return self.ready.context_length if self.ready else 0

    @property
    def waiting(self) -> int:
        return self.open - self.processing

    def observe(self, event: Event) -> None:
        """Takes the engine's own events."""
        match event:
            case Ready():
                self.ready, self.parallel = event, event.parallel
            case Slots():
                self.slots = event
            case Failed(request_id=None):
                self.slots = None

    def check_open(self) -> None:
        """Raises ApiError if the server ends."""
        if self.stopping:
            raise unavailable("The server is stopping.")

    def check_ready(self) -> None:
        """Raises ApiError while the engine cannot answer."""
        self.check_open()
        if self.ready is None:
            raise unavailable("Loading model")

    async def parts(self, exchange: Exchange, answers: Sequence[ServedAnswer]) -> Parts:
        """While the model loads, they wait for it. Closing the parts early cancels the requests. Raises ApiError."""
        self.check_open()
        exchange.answers = n = len(answers)
        most = self.parallel + self.max_waiting
        is_in_parts = exchange.one_by_one or n > most  # a longer list than all places would never be answered
        at_once = min(2 * self.parallel if is_in_parts else n, most)
        places = min(n, at_once)
        address = address_of(exchange.client)
        late = 0 if self._open_by[address] else self.max_waiting  # others may have taken all places
        if self.open + places > most + late:
            message = f"The server has {self.parallel} requests at work and {self.waiting} waiting."
            headers = {"Retry-After": str(self._retry_s())}
            raise ApiError(429, message, "rate_limit_error", code="too_many_requests", headers=headers)
        begun, ended = set[int](), set[int]()
        self.open += places
        self._open_by[address] += 1
        try:
            await self.make_room()
            asks = {"client": exchange.client, "connection": exchange.connection}
            requests = [replace(answer.request, **asks) for answer in answers]
            events = [
                self.watch(request, exchange.timed(self.engine.generate(request))) for request in requests
            ]
            streams = [answer.parts(each) for answer, each in zip(answers, events, strict=True)]
            async with aclosing(merged(streams, at_once)) as parts:
                async for i, part in parts:
                    if isinstance(part, AnswerBegun):
                        begun.add(i)
                        self.processing += 1
                    elif isinstance(part, AnswerEnd):
                        ended.add(i)
                        exchange.finished.append(part.finished)
                        left = min(n - len(ended), at_once)
                        self.open -= places - left
                        places = left
                        self.processing -= i in begun
                    yield i, part
        finally:
            self.open -= places
            self._open_by -= Counter([address])  # forgets those that have none
            self.processing -= len(begun - ended)
            self.on_ended()

    def _retry_s(self) -> int:
        """When a place may be free: the mean time of an answer, for each that waits."""
        seconds = self.metrics.answers.mean * (self.waiting + 1) / self.parallel
        return min(max(math.ceil(seconds), 1), MAX_RETRY_S)


@dataclass
class Exchange:
    """A request for a completion, from its arrival to its end. `is_streamed`: the answer is being sent."""

    service: Service
    client: str
    path: str
    connection: int = 0  # its port, where others of its client are
    _started: float = field(default_factory=time.perf_counter)
    answers: int = 1
    is_streamed: bool = False
    note: str = ""  # which part of the request is ignored
    one_by_one: bool = False  # see `Asked`
    on_closed: Callable[[int], object] = lambda tokens: None  # hears how many there were
    finished: list[Finished] = field(default_factory=list)
    _has_token: bool = False
    _closed: bool = False

    async def timed(self, events: Events) -> Events:
        """`events` of an answer. Counts the times of its tokens: of the first one here, else as the engine says."""
        metrics, before_ms = self.service.metrics, None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Token):
                    if not self._has_token:
                        self._has_token = True
                        metrics.begun(self._seconds)
                    if event.at_ms is not None and before_ms is not None:
                        metrics.between_tokens.add((event.at_ms - before_ms) / 1e3)
                    before_ms = event.at_ms
                yield event

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """Closes it if the code within raises. What a client asks for and cannot be is an ApiError, too."""
        try:
            yield
        except UsageError as error:
            refused = of_usage(error)
            self.close(refused.status, refused.kind)
            raise refused from None
        except ApiError as error:
            self.close(200 if self.is_streamed else error.status, error.shown)
            raise
        except ClientGoneError:
            self.close(CLIENT_GONE)
            raise
        except Exception:
            self.close(500, "server_error")
            raise

    def close(self, status: int, error: str = "") -> None:
        """Counts the request and reports it, once."""
        if self._closed:
            return
        self._closed = True
        self.on_closed(sum(end.prompt_n + end.predicted_n for end in self.finished))
        if not error and len(self.finished) < self.answers:
            status = CLIENT_GONE
        metrics, ended = self.service.metrics, self.finished
        metrics.requests[status] += 1
        for finished in ended:
            metrics.answered(finished, self._seconds)
        together = replace(ended[0], predicted_n=sum(end.predicted_n for end in ended)) if ended else None
        if together and self.one_by_one:
            names = ("prompt_n", "cached_n", "prompt_ms")
            together = replace(together, **{name: sum(getattr(end, name) for end in ended) for name in names})
        problem = "" if together else error or "the client has gone"
        at = time.strftime("%H:%M:%S")
        self.service.on_handled(
            Handled(at, self.client, self.path, status, together, problem, self.note, self.service.shown_name)
        )

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started
