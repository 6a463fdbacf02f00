"""A conversation with an engine: prompts go in, replies grow, everything is saved. What it looks like is the
business of a `View`; nothing here knows the screen."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from app.chat.conversation import Conversation
from app.chat.history import History, HistoryError
from app.chat.search_summary import SearchSummary
from app.chat.status import StatusObserver
from app.chat.turn import Turn
from engine.client import Engine
from engine.events import Chat, Event, Failed, Finished, Generate, Ready, Sampling, Thinking, Token
from widgets.text import one_line
from widgets.turn import WARNING

STOP_S = 3.0
"""An engine that does not stop within this is no longer listened to."""
EMPTY = "The model gave an empty reply"
NOTHING_TO_ADD = "The model has nothing to add"


class View(Protocol):
    """Who shows a session. What grows (`Session.reply`, `Session.status`) it looks at when it draws."""

    async def added(self, turn: Turn) -> None:
        """`turn` is the last of the conversation now."""

    async def changed(self, turn: Turn) -> None:
        """The note of `turn` has changed, or its text has come to its end."""

    async def cut(self, index: int) -> None:
        """The turns from `index` on are gone."""

    async def opened(self) -> None:
        """It is another conversation now."""

    def queue_changed(self) -> None:
        """`Session.queued` has changed."""

    def give_back(self, text: str) -> None:
        """A prompt that will not be sent belongs to the user again."""

    def notice(self, text: str, *, warning: bool = False) -> None:
        """Something to be said in one line; "" takes back what was said."""

    def problem_changed(self, problem: HistoryError | None) -> None:
        """The conversation is not saved, or is again."""


@dataclass
class Candidate:
    """An engine on its way: `name` is what the user knows it by."""

    engine: Engine
    name: str
    status: StatusObserver
    search: SearchSummary = field(default_factory=SearchSummary)

    @property
    def welcome(self) -> str:
        return ", ".join(filter(None, [f"{self.name} answers now", self.search.text]))


class ChatOptions(TypedDict, total=False):
    """What a chat begins with; all of it may be changed later."""

    sampling: Sampling
    system: str
    max_tokens: int | None
    think: bool


class Session:
    """One engine, one conversation at a time. The engine does one thing at a time; a prompt that comes
    meanwhile waits in `queued`. `spawn` runs a coroutine beside all else, and reports what it raises."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        view: View,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
        system: str = "",
        max_tokens: int | None = None,
        think: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.history = history
        self.view = view
        self.sampling = sampling
        self.system = system
        self.max_tokens = max_tokens
        self.think = think
        self.clock = clock
        self.conversation = Conversation(history, system)
        self.status = StatusObserver(clock)
        self.queued = ""
        self.reply: Turn | None = None  # the one in progress, from its first text on
        self.candidate: Candidate | None = None  # what the session goes over to when it is ready
        self.watch: Callable[[Event], None] = lambda _: None  # told of every event of the engine in use
        self._spawn = spawn
        self._request_ids = itertools.count(1)
        self._request: Generate | None = None  # what is being answered
        self._is_starting = False
        self._ended = asyncio.Event()
        self._thinking_since: float | None = None

    @property
    def is_answering(self) -> bool:
        return self._request is not None

    @property
    def is_busy(self) -> bool:
        """Whether the engine is starting or answering."""
        return self._is_starting or self.is_answering

    # --- what a user wants ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine."""
        self._is_starting = True
        self._spawn(self._start())

    async def send(self, text: str, in_place_of: int | None = None) -> None:
        """Sends a prompt or, while the engine is busy, lets it wait. `in_place_of`: the index of the turn to
        take away first, with all that follow."""
        if in_place_of is not None:
            self.conversation.cut(in_place_of)
            await self.view.cut(in_place_of)
        if self.is_busy:
            self.queued = text
            self.view.queue_changed()
        else:
            await self._send(text)

    def take_back(self) -> None:
        """The prompt that waits goes back to the user."""
        text, self.queued = self.queued, ""
        self.view.queue_changed()
        if text:
            self.view.give_back(text)

    def switch(self, engine: Engine, name: str, adopted: Callable[[], None] = lambda: None) -> None:
        """Goes over to `engine`, known to the user as `name`, once it is ready, with the conversation kept;
        `adopted` is called then. Until then, and if it does not start, the one in use goes on answering. What
        is being started already is given up for it."""
        self.cancel_switch()
        self.candidate = Candidate(engine, name, StatusObserver(self.clock))
        self._spawn(self._switch(self.candidate, adopted))
        if self.is_answering:
            self.view.notice(f"{name} is being prepared and answers after this reply")

    def cancel_switch(self) -> None:
        """Gives up the engine that is being started."""
        if self.candidate is not None:
            candidate, self.candidate = self.candidate, None
            self._ended.set()
            self._spawn(candidate.engine.close())

    async def stop(self) -> None:
        """Ends the reply in progress; what has arrived is kept."""
        if self.is_answering:
            self.status.stopping()
            await self.engine.stop()

    async def regenerate(self) -> None:
        """Answers the last prompt again. The last reply comes back if there is none in its place."""
        turns = self.conversation.turns
        replaced = None
        if turns[-1].role == "assistant":
            [replaced] = self.conversation.cut(len(turns) - 1)
        self._ask(replaced=replaced)
        if replaced is not None:
            await self.view.cut(len(turns))
        if turns:
            turns[-1].note = ""
            await self.view.changed(turns[-1])

    async def go_on(self) -> None:
        """Continues the last reply where it ended."""
        reply = self.conversation.turns[-1]
        reply.note, reply.finished, reply.streaming = "", False, True
        self._ask(reply=reply)
        await self.view.changed(reply)

    async def open(self, chat_id: int | None) -> None:
        """Goes to a past chat, or a new one. A reply in progress is stopped first, and kept in its chat."""
        self.take_back()
        while self.is_answering:
            self._ended.clear()
            await self.stop()
            try:
                await asyncio.wait_for(self._ended.wait(), STOP_S)
            except TimeoutError:
                self._request = self.reply = None
            self.take_back()
        try:
            self.conversation = Conversation(self.history, self.system, chat_id)
        except HistoryError as error:
            self.view.notice(str(error), warning=True)
            return
        self.status.new_conversation(context_used=0 if chat_id is None else None)
        self.view.notice("")
        await self.view.opened()

    def set_system(self, text: str) -> None:
        """Gives this conversation another system prompt ("": none), from the next request on."""
        self.conversation.system = text
        self.save()

    async def close(self) -> None:
        """Ends the engines."""
        if self.candidate is not None:
            await self.candidate.engine.close()
        await self.engine.close()

    def save(self) -> None:
        """Brings the history up to date; the view is told what keeps it from that."""
        self.conversation.save(self.status.snapshot().model)
        self.view.problem_changed(self.history.problem or self.conversation.problem)

    # --- the engine -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        engine, failure = self.engine, None
        async for event in _events(engine.start()):
            if self.engine is not engine:
                return  # another has taken its place
            self.status.observe(event)
            self.watch(event)
            if isinstance(event, Failed):
                failure = event
            elif isinstance(event, Ready) and event.warnings:
                self.view.notice(" ".join(event.warnings), warning=True)
        self._is_starting = False
        if failure is not None:
            self.view.notice(_sentence(failure), warning=True)
        await self._next(failure)

    async def _switch(self, candidate: Candidate, adopted: Callable[[], None]) -> None:
        end = await self._start_candidate(candidate)
        if _lacks_memory(end) and await self._may_take_over(candidate):
            # There is no room for two: once more, alone. The other starts again when it is needed.
            await self.engine.close()
            candidate.status = StatusObserver(self.clock)
            end = await self._start_candidate(candidate)
        has_failed = isinstance(end, Failed)  # which need not wait for the end of a reply
        if not (self.candidate is candidate if has_failed else await self._may_take_over(candidate)):
            return
        self.candidate = None
        if isinstance(end, Failed):
            await candidate.engine.close()
            self.view.notice(f"{candidate.name} did not start: {_sentence(end)}", warning=True)
            return
        before, self.engine = self.engine, candidate.engine
        self._is_starting = False
        was, self.status = self.status.snapshot(), candidate.status
        is_same = was.model == self.status.snapshot().model  # whose tokens are the same
        used = was.context_used if is_same else None
        self.status.new_conversation(context_used=used if self.conversation.turns else 0)
        self.watch(end)
        adopted()
        self.view.notice(". ".join([candidate.welcome, *end.warnings]), warning=bool(end.warnings))
        await self._next(None)
        await before.close()

    async def _start_candidate(self, candidate: Candidate) -> Ready | Failed:
        async for event in _events(candidate.engine.start()):
            candidate.status.observe(event)
            candidate.search.observe(event)
            if isinstance(event, Ready | Failed):
                return event
        return Failed(kind="internal", message="It ended without a word.")

    async def _may_take_over(self, candidate: Candidate) -> bool:
        """Waits for the end of the reply in progress. False if `candidate` is not wanted any more."""
        while self.candidate is candidate and self.is_answering:
            self._ended.clear()
            await self._ended.wait()
        return self.candidate is candidate

    async def _next(self, failure: Failed | None) -> None:
        """The engine is idle: it gets the prompt that waits or, after a failure, the user gets it back."""
        if self.queued and failure is None:
            text, self.queued = self.queued, ""
            self.view.queue_changed()
            await self._send(text)
        elif self.queued:
            self.take_back()

    async def _send(self, text: str) -> None:
        turn = Turn("user", text)
        self.view.notice("")
        self.conversation.add(turn)
        self.save()
        self._ask()
        await self.view.added(turn)

    def _ask(self, reply: Turn | None = None, replaced: Turn | None = None) -> None:
        """Has the conversation answered. `reply`: the last turn, to go on with. `replaced`: the reply whose
        place the new one is to take."""
        self._request = Generate(
            request_id=next(self._request_ids),
            prompt=Chat(messages=self.conversation.messages(), think=self.think),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
        )
        self.reply, self._thinking_since = reply, None
        self.status.request()
        self._spawn(self._answer(self._request, replaced))

    async def _answer(self, request: Generate, replaced: Turn | None) -> None:
        end: Finished | Failed = Failed(kind="internal", message="The engine stopped without saying why.")
        gained = False
        async for event in _events(self.engine.generate(request)):
            if self._request is not request:
                return  # no longer listened to
            self.status.observe(event)
            self.watch(event)
            if isinstance(event, Token) and event.text:
                gained = True
                await self._receive(event)
            elif isinstance(event, Finished | Failed):
                end = event
        await self._end(end, gained, replaced)

    async def _receive(self, token: Token) -> None:
        reply = self.reply
        if reply is None:
            reply = self.reply = Turn("assistant", finished=False, streaming=True)
            self.conversation.add(reply)
            await self.view.added(reply)
        now = self.clock()
        if isinstance(token, Thinking):
            self._thinking_since = self._thinking_since or now
            reply.thinking += token.text
            reply.thinking_s = now - self._thinking_since
        else:
            reply.content += token.text

    async def _end(self, end: Finished | Failed, gained: bool, replaced: Turn | None) -> None:
        """An answer has come to its end, one way or another."""
        turn = self.reply or self.conversation.turns[-1]
        turn.streaming = False
        if gained:
            turn.finished = isinstance(end, Finished)
            turn.note = self._note(end)
        elif replaced is not None:
            self.conversation.add(replaced)
            await self.view.added(replaced)
            reason, *_ = self._reason(end) or (EMPTY,)
            self.view.notice(f"{reason}; the earlier reply stays", warning=True)
        else:
            turn.finished = turn.finished or isinstance(end, Finished)
            empty = f"{EMPTY} · Ctrl+R tries again" if turn.role == "user" else NOTHING_TO_ADD
            turn.note = self._note(end) or empty
        self._request = self.reply = None
        self.save()
        await self.view.changed(turn)
        self._ended.set()
        await self._next(end if isinstance(end, Failed) else None)

    def _note(self, end: Finished | Failed) -> str:
        """One line about how a reply ended and which key helps; "" if it came to its own end."""
        return " · ".join(self._reason(end))

    def _reason(self, end: Finished | Failed) -> tuple[str, str] | tuple[()]:
        """Why a reply is not complete, and which key helps; empty if it came to its own end."""
        if isinstance(end, Failed):
            key = "Ctrl+N starts a new chat" if end.kind == "context" else "Ctrl+R tries again"
            return f"{WARNING} {_sentence(end)}", key
        if end.reason == "cancelled":
            return "stopped", "Ctrl+G goes on"
        if end.reason == "length":
            if self.max_tokens is not None and end.predicted_n >= self.max_tokens:
                return f"stopped at {end.predicted_n:,} tokens, as asked", "Ctrl+G goes on"
            length = self.status.snapshot().context_length
            if not length or end.context_used < length - 1:  # a server's own limit; some leave one token free
                return f"cut at {end.predicted_n:,} tokens", "Ctrl+G goes on"
            return f"{WARNING} The context of {length:,} tokens is full", "Ctrl+N starts a new chat"
        return ()


def _lacks_memory(event: Event) -> bool:
    return isinstance(event, Failed) and "memory" in event.message.lower()


def _sentence(failure: Failed) -> str:
    message = failure.message if failure.message.endswith((".", "!", "?")) else f"{failure.message}."
    return one_line(f"{message} {failure.hint}")


async def _events(stream: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """An engine's events. One that breaks its promise and raises must not take the conversation with it."""
    try:
        async for event in stream:
            yield event
    except Exception as error:
        yield Failed(kind="internal", message=f"The engine broke off: {type(error).__name__}: {error}.")
