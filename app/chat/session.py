"""A conversation with an engine: it sends prompts, collects replies and saves both. A `View` shows it: the full screen,
or the line mode."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from app.chat import failures
from app.chat.candidate import Candidate
from app.chat.configuration import missed_adapters, remarks_on
from app.chat.conversation import OPEN_ELSEWHERE, Conversation
from app.chat.history import History
from app.chat.history_database import HistoryError
from app.chat.saver import Saver
from app.chat.status import StatusObserver
from app.chat.summary import summary_tokens
from app.chat.tool_use import Permissions, ToolUse, with_tools
from app.chat.view import View
from app.tools.toolbox import Toolbox
from engine.protocol.client import Engine, leave
from engine.protocol.events import (
    Chat,
    Event,
    Failed,
    Finished,
    Generate,
    Ready,
    Sampling,
    Seeing,
    Thinking,
    Token,
)
from widgets.chat.turn import Attachment, Turn
from widgets.text import counted

STOP_S = 3.0
"""If an engine does not stop within this time, its reply is ignored from then on."""


class Session:
    """One engine and one conversation at a time. While the engine is busy, one prompt waits in `queued`. `spawn` runs a
    coroutine in the background and reports what it raises. `clock` gives seconds."""

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
        tools: Toolbox | None = None,
        allowed: Sequence[str] = (),
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
        self.tools = ToolUse(tools or Toolbox({}), Permissions(allowed), view)
        self.status = StatusObserver(clock)
        self.queued = ""
        self._queued_files: tuple[Attachment, ...] = ()
        self.reply: Turn | None = None  # the one that grows, from its first text on
        self.candidate: Candidate | None = None  # the engine that the session switches to when it is ready
        self.flaws = ""  # of the settings, to be told with what the engine says when it is ready
        self.other_model = ""  # a sentence on how to choose one, for the user whose model does not load
        self.ways_on = ""  # a sentence on how to make room in a context that is nearly full
        self.is_full = False  # the context, so that the last reply was cut, or the last prompt not answered
        self.is_too_long = False  # the last prompt, for the context, whatever stands before it
        self.watch: Callable[[Event], None] = lambda _: None  # gets every event of the engine in use
        self._spawn = spawn
        self._request_ids = itertools.count(1)
        self._request: Generate | None = None  # the one in progress
        self._is_starting = False
        self._ended = asyncio.Event()
        self._thinking_since: float | None = None
        self._saver = Saver(history, view, self)

    @property
    def is_answering(self) -> bool:
        return self._request is not None

    @property
    def is_busy(self) -> bool:
        """Whether the engine is starting or answering."""
        return self._is_starting or self.is_answering

    def room(self, *, in_place: bool = False) -> int:
        """The tokens that the context has left for a prompt (0: not known). `in_place`: of an earlier one; what stands
        before that is not known."""
        status = self.status.snapshot()
        used = 0 if in_place else status.context_used or 0
        return max(1, status.context_length - used) if status.context_length else 0

    # --- what a user does -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine."""
        self._is_starting = True
        self._spawn(self._start())

    async def send(
        self, text: str, in_place_of: int | None = None, files: tuple[Attachment, ...] = ()
    ) -> None:
        """Sends a prompt with `files`. If the engine is busy, the prompt waits. `in_place_of`: the index of a turn that
        is removed first, with all after it."""
        if in_place_of is not None:
            self.conversation.cut(in_place_of)
            await self.view.cut(in_place_of)
        if self.is_busy:
            self.queued, self._queued_files = text, files
            self.view.queue_changed()
        else:
            await self._send(text, files)

    def take_back(self) -> None:
        """Gives the prompt that waits back to the user. Its files are read again when it is sent."""
        text, self.queued = self.queued, ""
        self._queued_files = ()
        self.view.queue_changed()
        if text:
            self.view.give_back(text)

    def switch(self, engine: Engine, name: str, adopted: Callable[[], None] = lambda: None) -> None:
        """Starts `engine`, which the user knows as `name`, and switches to it when it is ready; then calls `adopted`.
        The conversation stays. The engine in use answers until then, and goes on if `engine` does not start. An
        engine that is starting already is given up."""
        self.cancel_switch()
        self.candidate = Candidate(engine, name, self.clock)
        self._spawn(self._switch(self.candidate, adopted))
        if self.is_answering:
            self.view.notice(f"{name} is being prepared and answers after this reply")

    def cancel_switch(self) -> None:
        """Gives up the engine that is starting."""
        if self.candidate is not None:
            candidate, self.candidate = self.candidate, None
            self._ended.set()
            self._spawn(candidate.engine.close())

    async def stop(self) -> None:
        """Ends the reply in progress and keeps what has arrived."""
        if self.is_answering and not self.tools.stop():
            self.status.stopping()
            await self.engine.stop()

    async def regenerate(self) -> None:
        """Answers the last prompt again. If no new reply comes, the earlier one stays."""
        turns = self.conversation.turns
        prompt = self.conversation.prompt_before()
        replaced = self.conversation.cut(len(turns) if prompt is None else prompt + 1)
        self.tools.begin()
        self._ask(replaced=replaced)
        if replaced:
            await self.view.cut(len(turns))
        if turns:
            turns[-1].note = ""
            await self.view.changed(turns[-1])

    async def go_on(self) -> None:
        """Continues the last reply where it ended. A prompt without a reply is answered."""
        reply = self.conversation.turns[-1]
        if reply.role == "user":
            await self.regenerate()
            return
        self.tools.begin()
        if reply.calls:
            reply.note = ""
            self._request = Generate(request_id=0, prompt=Chat(messages=()))
            self._spawn(self._call_tools(reply))
        else:
            reply.note, reply.finished, reply.streaming = "", False, True
            self._ask(reply=reply)
            await self.view.changed(reply)

    async def leave_out(self) -> None:
        """Leaves the oldest turns out of what the model reads. The chat keeps them. Then goes on where the context was
        full."""
        conversation, was_full = self.conversation, self.is_full
        before = conversation.start
        if not (count := conversation.leave_out()):
            self.view.notice(failures.NOTHING_OLDER, warning=True)
            return
        self.is_full = False
        self.save()
        for index in filter(None, (before, conversation.start)):
            await self.view.changed(conversation.turns[index - 1])
        self.status.context_changed()
        self.view.notice(f"{counted(count, 'turn')} left out: the model reads the rest, the chat keeps all")
        if was_full:
            await self.go_on()

    async def summarize(self) -> None:
        """Begins a new chat with a summary of this one, which the model writes as the first reply. A prompt without a
        reply, such as one that did not fit into the context, is sent after it."""
        before, status = self.conversation, self.status.snapshot()
        if (summarized := before.to_summarize(status.context_length, status.context_used)) is None:
            self.view.notice("There is nothing to summarize yet", warning=True)
            return
        waiting = before.turns[-1] if before.turns[-1].role == "user" else None
        await self.open(None)
        conversation = self.conversation
        conversation.system, conversation.summarized = before.system, summarized
        turn = Turn("user", summarized.request(status.context_length), finished=False)
        conversation.turns.append(turn)
        self.save()
        if waiting is not None:
            self.queued, self._queued_files = waiting.content, waiting.files
        self.view.queue_changed()
        self._ask()
        await self.view.added(turn)

    async def open(self, chat_id: int | None) -> None:
        """Opens a past chat, or a new one. A reply in progress is stopped first and kept in its chat."""
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
            opened = self._saver.unsaved(chat_id) or Conversation(self.history, self.system, chat_id)
            is_shared = chat_id in self.history.open_elsewhere()
        except HistoryError as error:
            self.view.notice(str(error), warning=True)
            return
        self._saver.leave(self.conversation, opened)
        self.conversation = opened
        self.tools.permissions.new_chat()
        self.is_full = False
        self.status.new_conversation(context_used=0 if chat_id is None else None)
        remark = " ".join(filter(None, (OPEN_ELSEWHERE if is_shared else "", self._missed_adapters())))
        self.view.notice(remark, warning=bool(remark))
        await self.view.opened()

    def _missed_adapters(self) -> str:
        """A sentence if the chat began with adapters that the model lacks."""
        with suppress(HistoryError):
            if (chat_id := self.conversation.chat_id) is not None:
                return missed_adapters(self.history.model(chat_id), self.status.snapshot().ready)
        return ""

    async def show_version(self, index: int, step: int) -> bool:
        """Goes over to the version before (-1) or after (1) the one that is shown at a prompt. Whether there is one."""
        self.save()
        try:
            if not self.conversation.show_version(index, step):
                return False
        except HistoryError as error:
            self.view.notice(str(error), warning=True)
            return False
        await self.open(self.conversation.chat_id)
        return True

    async def fork(self, index: int) -> None:
        """Begins a new chat with all that came before a prompt, and gives the prompt to the user."""
        before = self.conversation
        await self.open(None)
        self.conversation.begin_as(before, index)
        self.save()
        await self.view.opened()
        self.view.give_back(before.turns[index].content)

    def set_system(self, text: str) -> None:
        """Sets the system prompt of this conversation ("": none), from the next prompt on."""
        self.conversation.system = text
        self.save()

    async def close(self) -> None:
        """Ends the engines, or keeps the one in use warm if it was made so."""
        if self.candidate is not None:
            await self.candidate.engine.close()
        await asyncio.gather(self.tools.toolbox.close(), leave(self.engine))

    def save(self) -> None:
        """Writes the conversation to the history. The view hears of a failure, and it is tried again."""
        self._saver.now()

    # --- the engine -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        engine, failure = self.engine, None
        async for event in failures.events_of(engine.start()):
            if self.engine is not engine:
                return  # the session has switched to another one
            self.status.observe(event)
            self.watch(event)
            if isinstance(event, Failed):
                failure = event
            elif isinstance(event, Ready):
                missed = self._missed_adapters()
                if remarks := " ".join(filter(None, (*remarks_on(event, self.sampling), missed))):
                    said = f"{self.flaws} {remarks}".lstrip()
                    self.view.notice(said, warning=bool(self.flaws or event.warnings or missed))
        self._is_starting = False
        if failure is not None:
            advice = self.other_model if failures.is_about_model(failure) else ""
            self.view.notice(f"{self.flaws} {failures.in_words(failure)} {advice}".strip(), warning=True)
        await self._next(may_send=failure is None)

    async def _switch(self, candidate: Candidate, adopted: Callable[[], None]) -> None:
        end = await candidate.start()
        squeezed = isinstance(end, Ready) and end.is_squeezed
        if (squeezed or failures.lacks_memory(end)) and await self._may_take_over(candidate):
            # Memory does not hold two engines. Close the one in use and try again; it restarts if it is needed.
            await self.engine.close()
            if squeezed:
                await candidate.engine.close()
            end = await candidate.start()
        has_failed = isinstance(end, Failed)  # then there is no need to wait for the end of a reply
        if not (self.candidate is candidate if has_failed else await self._may_take_over(candidate)):
            return
        self.candidate = None
        if isinstance(end, Failed):
            await candidate.engine.close()
            self.view.notice(f"{candidate.name} did not start: {failures.in_words(end)}", warning=True)
            return
        old_engine, self.engine = self.engine, candidate.engine
        self._is_starting = self.is_full = False
        old_status, self.status = self.status.snapshot(), candidate.status
        # In another model's tokens, the conversation has another length.
        same_model = old_status.ready.model.title == self.status.snapshot().ready.model.title
        used = old_status.context_used if same_model else None
        self.status.new_conversation(context_used=used if self.conversation.turns else 0)
        adopted()
        self.watch(end)
        welcome = ", ".join(filter(None, [f"{candidate.name} answers now", candidate.status.search.text]))
        self.view.notice(". ".join([welcome, *remarks_on(end, self.sampling)]), warning=bool(end.warnings))
        await self._next(may_send=True)
        await old_engine.close()

    async def _may_take_over(self, candidate: Candidate) -> bool:
        """Waits for the end of the reply in progress. False if `candidate` was given up."""
        while self.candidate is candidate and self.is_answering:
            self._ended.clear()
            await self._ended.wait()
        return self.candidate is candidate

    async def _next(self, *, may_send: bool) -> None:
        """The engine is idle. Sends the prompt that waits; after a failure or a stop, the user gets it back."""
        if self.queued and may_send:
            text, self.queued = self.queued, ""
            files, self._queued_files = self._queued_files, ()
            self.view.queue_changed()
            await self._send(text, files)
        elif self.queued:
            self.take_back()

    async def _send(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        turn = Turn("user", text, finished=False, files=files)  # until a reply begins, or its request ends
        self.view.notice("")
        self.conversation.turns.append(turn)
        self.save()
        self.tools.begin()
        self._ask()
        await self.view.added(turn)

    def _ask(self, reply: Turn | None = None, replaced: Sequence[Turn] = ()) -> None:
        """Asks the engine for a reply. `reply`: the last turn, which it continues. `replaced`: the earlier reply, which
        comes back if there is no new one."""
        conversation, most, think = self.conversation, self.max_tokens, self.think
        if conversation.awaits_summary:
            most, think = summary_tokens(self.status.snapshot().context_length, most), False
        self.is_full = False
        self._request = Generate(
            request_id=next(self._request_ids),
            prompt=Chat(messages=conversation.messages(sees=self.status.sees), think=think),
            sampling=self.sampling,
            max_tokens=most,
        )
        self.reply, self._thinking_since = reply, None
        self._spawn(self._answer(self._request, replaced))

    async def _answer(self, request: Generate, replaced: Sequence[Turn]) -> None:
        end: Finished | Failed = Failed(kind="internal", message="The engine stopped without saying why.")
        gained = False
        tools = "" if self.conversation.awaits_summary else await self.tools.offer()
        if self._request is not request:
            return
        if tools is None:
            await self._end(failures.STOPPED, False, replaced)
            return
        self.status.request()
        events = failures.events_of(self.engine.generate(with_tools(request, tools)))
        async for event in self.tools.without_calls(events):
            if self._request is not request:
                return  # the session ignores this reply now
            self.status.observe(event)
            self.watch(event)
            if isinstance(event, Seeing) and (turn := self.conversation.seen(event.index, event.tokens)):
                await self.view.changed(turn)
            elif isinstance(event, Token) and event.text:
                gained = True
                await self._receive(event)
            elif isinstance(event, Finished | Failed):
                end = event
        await self._end(end, gained, replaced)

    async def _reply(self) -> Turn:
        """The turn of the reply in progress."""
        if (reply := self.reply) is None:
            self.conversation.turns[-1].finished = True
            reply = self.reply = Turn("assistant", finished=False, streaming=True)
            self.conversation.turns.append(reply)
            await self.view.added(reply)
        return reply

    async def _receive(self, token: Token) -> None:
        reply, now = await self._reply(), self.clock()
        if isinstance(token, Thinking):
            self._thinking_since = self._thinking_since or now
            reply.thinking += token.text
            reply.thinking_s = now - self._thinking_since
        else:
            reply.add(token.text, guessed=token.guessed)
        if self.history.problem is None:
            self._saver.soon()

    async def _end(self, end: Finished | Failed, gained: bool, replaced: Sequence[Turn]) -> None:
        """A reply has ended. `gained`: it has text."""
        asked = self._request.max_tokens if self._request else None
        status = self.status.snapshot()
        self.is_full = failures.fills_context(end, status.context_length, asked)
        used = 0 if self.conversation.has_one_prompt else status.context_used
        self.is_too_long = used is not None and failures.is_prompt_too_long(end, used)
        if self.is_full and await self._summarizes_less():
            self._ask(replaced=replaced)
            return
        why = failures.reason(
            end, status.context_length, self.max_tokens, is_full=self.is_full, is_too_long=self.is_too_long
        )
        if calls := self.tools.calls:
            (await self._reply()).calls, gained = calls, True
        turn = self.reply or self.conversation.turns[-1]
        turn.streaming = False
        if gained:
            turn.finished = isinstance(end, Finished)
            turn.note = " · ".join(why)
        elif replaced:
            self.conversation.turns += replaced
            for earlier in replaced:
                await self.view.added(earlier)
            self.view.notice(f"{(why or (failures.EMPTY,))[0]}; the earlier reply stays", warning=True)
        else:
            turn.finished = turn.finished or turn.role == "user" or isinstance(end, Finished)
            nothing = failures.NO_REPLY if turn.role == "user" else failures.NOTHING_TO_ADD
            turn.note = " · ".join(why) or nothing
        if calls and not why:
            await self._call_tools(turn)
        else:
            await self._over(turn, end)

    async def _call_tools(self, turn: Turn) -> None:
        """Runs the calls at the end of a reply. Then the model goes on with what they returned."""
        request, self.reply = self._request, None
        self.save()
        await self.view.changed(turn)
        turn.note = await self.tools.run(turn, self.status.snapshot().context_length)
        if self._request is request and turn.note:
            await self._over(turn, failures.STOPPED)
        elif self._request is request:  # else the chat was left
            self._ask()

    async def _over(self, turn: Turn, end: Finished | Failed) -> None:
        """There is no more to come. `turn` is the last that has changed."""
        self._request = self.reply = None
        self.save()
        await self.view.changed(turn)
        self._ended.set()
        if self.conversation.awaits_summary:
            self.status.context_changed()  # the next prompt has the summary in place of what was summarized
        elif self.status.snapshot().is_nearly_full and not self.is_full and self.ways_on:
            self.view.notice(f"The context is nearly full: {self.ways_on}", warning=True)
        await self._next(may_send=isinstance(end, Finished) and end.reason != "cancelled")

    async def _summarizes_less(self) -> bool:
        """Whether a chat that does not fit into the context is shortened, to be summarized again."""
        if not self.conversation.summarize_less(self.status.snapshot().context_length):
            return False
        await self.view.cut(1)
        await self.view.changed(self.conversation.turns[0])
        self.view.notice("The chat does not fit into the context: older messages are left out of the summary")
        return True
