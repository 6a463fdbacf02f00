"""An answer as a client sees it, made from the events of the engine: text, thinking, calls of tools, and its end."""

import asyncio
import secrets
import string
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from app.serve.errors import of_failure, unavailable
from app.serve.line_ends import LineEnds
from app.serve.stop_texts import StopTexts
from engine.formats.tools.calls import FunctionCall, ToolCallParser
from engine.protocol.event_stream import AnswerStats
from engine.protocol.events import Embedded, Event, Failed, Finished, Generate, Prefilling, Thinking, Token

_ID = string.ascii_letters + string.digits


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class AnswerBegun:
    """The engine has begun with the request: it is valid. Of the prompt's tokens `cached_n` need not be computed."""

    prompt_n: int
    cached_n: int


@dataclass(frozen=True)
class AnswerProgress:
    """More of the prompt has been read, as `prefilling` says."""

    prefilling: Prefilling


@dataclass(frozen=True)
class CallPiece:
    """The next piece of a call's arguments, which are JSON. The first one of a call has its id and name."""

    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class AnswerDelta:
    """What is new. `tokens` are those of the answer since the last delta, for log-probabilities."""

    content: str = ""
    reasoning: str = ""
    call: CallPiece | None = None
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class AnswerVector:
    """What there is in place of an answer: see `Embedded`."""

    values: bytes


@dataclass(frozen=True)
class AnswerEnd:
    """`reasoning_n` tokens of the answer were thinking. `stop_text`: the client's text at which it stopped, or ""."""

    finish_reason: FinishReason
    finished: Finished
    reasoning_n: int
    stop_text: str = ""


Part = AnswerBegun | AnswerProgress | AnswerDelta | AnswerVector | AnswerEnd
Events = AsyncGenerator[Event, None]
Parts = AsyncGenerator[tuple[int, Part], None]
"""The parts of several answers, each with the place of its answer."""


@dataclass
class ServedAnswer:
    """Follows one answer. It ends at one of the client's texts (`stop`), its tokens (`stop_ids`), where its `lines` say
    so, and with `one_call` before a second call. With `takes_pieces`, a call that is cut is given as far as it came."""

    request: Generate
    stop: StopTexts
    parser: ToolCallParser | None = None
    one_call: bool = False
    stop_ids: frozenset[int] = frozenset()
    takes_pieces: bool = True
    lines: LineEnds | None = None
    _stats: AnswerStats = field(init=False)
    _tokens: list[Token] = field(default_factory=list)
    _calls: int = 0
    _reasoning_n: int = 0

    async def parts(self, events: Events) -> AsyncGenerator[Part, None]:
        """`AnswerBegun`, the deltas, and `AnswerEnd`. Closing them early cancels the request. Raises ApiError if the
        engine does not answer."""
        self._stats = AnswerStats(self.request, reason="stop")
        begun, end = False, None
        async with aclosing(events):
            async for event in events:
                match event:
                    case Failed():
                        raise of_failure(event)
                    case Prefilling():
                        if not begun:
                            begun, self._stats = True, AnswerStats(self.request, reason="stop")
                            yield AnswerBegun(event.total, event.cached)
                        self._stats.prompt_n, self._stats.cached_n = event.total, event.cached
                        yield AnswerProgress(event)
                    case Thinking():
                        self._stats.count_token()
                        self._reasoning_n += 1
                        if event.text:
                            if self.parser:
                                self.parser.think(event.text)
                            yield AnswerDelta(reasoning=event.text)
                    case Token():
                        self._stats.count_token()
                        if event.id in self.stop_ids:
                            for delta in self._deltas(self._rest()):
                                yield delta
                            break
                        self._tokens.append(event)
                        for delta in self._deltas(self._shown(self.stop.feed(event.text))):
                            yield delta
                        if self.stop.found or self._ends_by_lines or self._has_enough:
                            break
                    case Embedded():
                        yield AnswerVector(event.values)
                    case Finished(reason="cancelled"):
                        raise unavailable("The server is stopping.")
                    case Finished():
                        end = event
                        for delta in self._deltas(self._rest()):
                            yield delta
            finished = end or self._stats.finished()
            for delta in self._flushed(is_cut=self.takes_pieces and finished.reason == "length"):
                yield delta
            is_cut = finished.reason == "length" or self._ends_by_lines
            reason: FinishReason = "length" if is_cut else "stop"
            if self._calls and reason == "stop":
                reason = "tool_calls"
            yield AnswerEnd(reason, finished, self._reasoning_n, self.stop.found)

    @property
    def _has_enough(self) -> bool:
        return self.one_call and self._calls > 1

    @property
    def _ends_by_lines(self) -> bool:
        return self.lines is not None and self.lines.found

    def _shown(self, text: str) -> str:
        return self.lines.feed(text) if self.lines else text

    def _rest(self) -> str:
        """What was held back, at the end."""
        rest = self._shown(self.stop.flush())
        return rest + self.lines.flush() if self.lines else rest

    def _deltas(self, text: str) -> Iterable[AnswerDelta]:
        yield from self._made(self.parser.feed(text) if self.parser else [text] if text else [])

    def _made(self, parts: Iterable[str | FunctionCall]) -> Iterable[AnswerDelta]:
        for part in parts:
            self._calls += isinstance(part, FunctionCall) and bool(part.name)
            if not self._has_enough:
                yield self._delta(part)

    def _flushed(self, *, is_cut: bool) -> Iterable[AnswerDelta]:
        yield from self._made(self.parser.flush(is_cut=is_cut) if self.parser else ())
        if self.request.logprobs and self._tokens:
            yield self._delta("")

    def _delta(self, part: str | FunctionCall) -> AnswerDelta:
        if isinstance(part, FunctionCall):
            return AnswerDelta(call=CallPiece(part.arguments, _call_id() if part.name else "", part.name))
        tokens, self._tokens = tuple(self._tokens), []
        return AnswerDelta(content=part, tokens=tokens)


def _call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse others."""
    return "".join(secrets.choice(_ID) for _ in range(9))


async def merged(streams: Sequence[AsyncGenerator[Part, None]], at_once: int) -> Parts:
    """The parts as they come, of so many streams at a time. Closing them early cancels all; so does an error of
    one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as parts:
            async for part in parts:
                yield 0, part
        return
    queue: asyncio.Queue[tuple[int, Part | None]] = asyncio.Queue()

    places = asyncio.Semaphore(at_once)

    async def follow(i: int, stream: AsyncGenerator[Part, None]) -> None:
        try:
            async with places, aclosing(stream) as parts:
                async for part in parts:
                    queue.put_nowait((i, part))
        finally:
            queue.put_nowait((i, None))

    tasks = [asyncio.ensure_future(follow(i, stream)) for i, stream in enumerate(streams)]
    try:
        going = len(tasks)
        while going:
            i, next_part = await queue.get()
            if next_part is None:
                going -= 1
                await tasks[i]  # raises its error
            else:
                yield i, next_part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
