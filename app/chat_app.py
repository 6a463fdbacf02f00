"""The full-screen chat: keys and engine events come in here, and go to the widgets and the history."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from textual import on, work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import TextSelected
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker

from app.actions import ACTIONS, key_label
from app.conversation import Conversation
from app.export import ExportError, to_markdown, write_new_file
from app.history import History, HistoryError
from app.screens.chats import ChatsScreen
from app.screens.help import HelpScreen
from app.status import StatusObserver
from engine.client import Engine
from engine.events import Chat, Event, Failed, Finished, Generate, Message, Sampling, Thinking, Token
from widgets.activity_line import ActivityLine, describe
from widgets.engine_status import EngineStatus, Phase
from widgets.prompt import Prompt
from widgets.reply_markdown import code_blocks
from widgets.status_line import StatusLine
from widgets.text import clean, one_line
from widgets.transcript import Transcript
from widgets.turn import WARNING, Turn
from widgets.turn_view import TurnView
from widgets.welcome import Welcome

PLACEHOLDER = "Ask anything · Enter sends · Ctrl+J new line · F1 keys"
EMPTY = "The model gave an empty reply · Ctrl+R tries again"
EDITING = "editing · Enter sends it in place of the old one and what follows · Esc leaves it"
TINY_WIDTH = 40
"""Narrower terminals show the chat and the prompt only."""
NOTICE_S = 5.0
STOP_S = 3.0
"""An engine that does not stop within this is no longer listened to."""
SAVE_S = 1.0
"""How much of a reply a crash may cost."""
FRAME_S = 0.2 if "SSH_CONNECTION" in os.environ else 0.1
"""Text is drawn this often: faster than anyone reads, seldom enough for a slow line."""
MAX_SHARE = 0.25
"""Of a core, for drawing. Where a frame costs more than this leaves room for, there are fewer of them,
but at least one in MAX_FRAME_S."""
MAX_FRAME_S = 1.0


class ChatApp(App[None]):
    """A conversation with an engine, saved in a history.

    `chat_id` opens a past chat, `initial_prompt` is sent as soon as the engine is ready, `think` asks a model
    that can think to do so. `clock` gives the seconds for whatever is timed on the screen. The engine is
    started when the application is, and closed with it.
    """

    TITLE = "orin-chat"
    CSS = """
    #columns { height: 1fr; }
    #chat { width: 1fr; }
    Welcome { display: none; }
    #chat.-empty Transcript { display: none; }
    #chat.-empty Welcome { display: block; }
    #queued { display: none; height: 1; padding: 0 2; color: $text-accent; }
    #queued.-waiting { display: block; }
    Prompt { margin: 0 1; }
    .-tiny ActivityLine, .-tiny StatusLine { display: none; }
    .-tiny Prompt { margin: 0; }
    .-tiny Transcript { padding: 0; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        *(Binding(action.key, action.name, action.title, show=False) for action in ACTIONS),
        Binding("pageup", "scroll(-1)", show=False, priority=True),
        Binding("pagedown", "scroll(1)", show=False, priority=True),
        Binding("ctrl+home", "scroll_to_start", show=False, priority=True),
        Binding("ctrl+end", "scroll_to_end", show=False, priority=True),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (TINY_WIDTH, "-narrow"), (100, "-wide")]  # noqa: RUF012

    def __init__(
        self,
        engine: Engine,
        history: History,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
        system: str = "",
        max_tokens: int | None = None,
        chat_id: int | None = None,
        initial_prompt: str = "",
        think: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.history = history
        self.sampling = sampling
        self.system = system
        self.max_tokens = max_tokens
        self.think = think
        self.conversation = Conversation(history, system)
        self.clock = clock
        self.status = StatusObserver(clock)
        self.queued = initial_prompt
        self._open_first = chat_id
        self._resumable: int | None = None  # the chat that Ctrl+G opens while this one is empty
        self._request_ids = itertools.count(1)
        self._work: Worker[None] | None = None  # the engine's starting or answering; None: it is idle
        self._reply: Turn | None = None  # the one in progress, from its first text on
        self._thinking_since: float | None = None
        self._editing: int | None = None  # index of the turn that the prompt box replaces
        self._frame_at = self._frame_cpu = self._save_at = self._notice_until = 0.0
        self._draft = self._title = ""
        self._told: HistoryError | None = None
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        with Horizontal(id="columns"), Vertical(id="chat"):
            yield Welcome()
            yield Transcript()
            yield ActivityLine()
            yield Static(id="queued", markup=False)
            yield Prompt(PLACEHOLDER)
        yield StatusLine()

    async def on_mount(self) -> None:
        self.column = self.query_one("#chat")
        self.waiting = self.query_one("#queued", Static)
        self.transcript = self.query_one(Transcript)
        self.prompt = self.query_one(Prompt)
        self.activity = self.query_one(ActivityLine)
        self.status_line = self.query_one(StatusLine)
        self.welcome = self.query_one(Welcome)
        self.prompt.focus()
        self._read_history()
        if self._open_first is not None:
            await self._open(self._open_first)
        self._show_queued()
        self._work = self._start_engine()
        self._timer = self.set_interval(FRAME_S, self._frame)
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no signals outside the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)

    async def on_unmount(self) -> None:
        self._save()
        self._save_draft()
        await self.engine.close()

    def _read_history(self) -> None:
        """Earlier prompts, a draft left behind, a reply that was interrupted, or that there is no history."""
        try:
            self.prompt.remember(self.history.prompts())
            self.prompt.put(self.history.take_draft())
            interrupted = self.history.unfinished()
            if self.history.problem:
                raise self.history.problem
            if (
                interrupted
                and self._open_first is None
                and interrupted[0].id == self.history.chats(limit=1)[0].id
            ):
                self._resumable = interrupted[0].id
                self.notice(
                    f"The reply in “{interrupted[0].title}” was interrupted · Ctrl+G opens it", seconds=60
                )
        except HistoryError as error:
            self._tell(error)

    # --- the engine -------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether the engine is starting or answering."""
        return self._work is not None

    @work(group="engine")
    async def _start_engine(self) -> None:
        failure = None
        async for event in _events(self.engine.start()):
            self.status.observe(event)
            if isinstance(event, Failed):
                failure = event
        self._work = None
        if failure is not None:
            self.notice(_sentence(failure), warning=True, seconds=3600)
        await self._next(failure)

    def _ask(self, reply: Turn | None = None, replaced: Turn | None = None) -> None:
        """Has the conversation answered. `reply`: the last turn, to go on with. `replaced`: the reply whose
        place the new one is to take; it comes back if there is no new one."""
        self.status.request()
        self._work = self._answer(reply, replaced)

    @work(group="engine")
    async def _answer(self, reply: Turn | None, replaced: Turn | None) -> None:
        request = Generate(
            request_id=next(self._request_ids),
            prompt=Chat(messages=self.conversation.messages(), think=self.think),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
        )
        self._reply, self._thinking_since = reply, None
        end: Finished | Failed = Failed(kind="internal", message="The engine stopped without saying why.")
        gained = False
        async for event in _events(self.engine.generate(request)):
            self.status.observe(event)
            if isinstance(event, Token) and event.text:
                gained = True
                await self._receive(event)
            elif isinstance(event, Finished | Failed):
                end = event
        await self._end(end, gained, replaced)

    async def _receive(self, token: Token) -> None:
        reply = self._reply
        if reply is None:
            reply = self._reply = Turn("assistant", finished=False, streaming=True)
            self.conversation.add(reply)
            await self.transcript.add(reply)
            self._save_at = time.monotonic() + SAVE_S
        now = self.clock()
        if isinstance(token, Thinking):
            self._thinking_since = self._thinking_since or now
            reply.thinking += token.text
            reply.thinking_s = now - self._thinking_since
        else:
            reply.content += token.text

    async def _end(self, end: Finished | Failed, gained: bool, replaced: Turn | None) -> None:
        """An answer has come to its end, one way or another."""
        self._work = None
        turn = self._reply or self.conversation.turns[-1]
        self._reply = None
        turn.streaming = False
        if gained:
            turn.finished = isinstance(end, Finished)
            turn.note = self._note(end)
            self._save()
        elif replaced is not None:
            self.conversation.add(replaced)
            await self.transcript.add(replaced)
            self.notice(f"{self._note(end) or EMPTY}; the earlier reply stays", warning=True)
        else:
            turn.finished = turn.finished or isinstance(end, Finished)
            turn.note = self._note(end) or EMPTY
            self._save()
        await self.transcript.sync(turn)
        self._show_status()
        await self._next(end if isinstance(end, Failed) else None)

    def _note(self, end: Finished | Failed) -> str:
        """One line about how a reply ended; "" where there is nothing to say."""
        if isinstance(end, Failed):
            key = "Ctrl+N starts a new chat" if end.kind == "context" else "Ctrl+R tries again"
            return f"{WARNING} {_sentence(end)} · {key}"
        if end.reason == "cancelled":
            return "stopped · Ctrl+G goes on"
        if end.reason == "length":
            used, length = end.context_used, self.status.snapshot().context_length
            if self.max_tokens is not None and end.predicted_n >= self.max_tokens:
                return f"stopped at {end.predicted_n:,} tokens, as asked · Ctrl+G goes on"
            return f"{WARNING} The context is full: {used:,} of {length:,} tokens · Ctrl+N starts a new chat"
        return ""

    async def _next(self, failure: Failed | None) -> None:
        """The engine is idle: it gets the prompt that waits or, after a failure, the user gets it back."""
        if not self.queued:
            return
        if failure is not None:
            self._take_back()
            return
        text, self.queued = self.queued, ""
        self._show_queued()
        await self._send(text)

    async def _send(self, text: str) -> None:
        turn = Turn("user", text)
        self.notice("")
        self.conversation.add(turn)
        self._save()
        await self.transcript.add(turn)
        await self.transcript.to_end()
        self._ask()

    # --- drawing and saving -----------------------------------------------------------------------------

    async def _frame(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        if now - self._frame_at < min(MAX_FRAME_S, (cpu - self._frame_cpu) / MAX_SHARE):
            return
        self._frame_at, self._frame_cpu = now, cpu
        if self._reply is not None:
            await self.transcript.sync(self._reply)
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            if self._reply is not None and self.conversation.problem is None:
                self._save()
            self._save_draft()
        if self._notice_until and self.clock() >= self._notice_until:
            self.notice("")
        self._show_status()

    def _show_status(self) -> None:
        status = self.status.snapshot()
        self.status_line.status = self.activity.status = self.welcome.status = status
        self.column.set_class(not self.conversation.turns, "-empty")
        self.activity.hint = self._hint(status)
        self._show_title()

    def _hint(self, status: EngineStatus) -> str:
        if status.phase in (Phase.PREFILLING, Phase.GENERATING):
            return "Esc stops"
        return "F1 keys  Ctrl+P commands" if status.phase in (Phase.READY, Phase.GONE) else ""

    def _show_queued(self) -> None:
        line = self.waiting
        line.update(
            Content(f"⏎ next: {one_line(self.queued)}")
            .truncate(max(20, self.size.width - 24), ellipsis=True)
            .append(Content.styled("  F2 takes it back", "$foreground 60%"))
        )
        line.set_class(bool(self.queued), "-waiting")

    def notice(self, text: str, *, warning: bool = False, seconds: float = NOTICE_S) -> None:
        """Says something in the line above the prompt for a while; "" takes it away."""
        self.activity.notice, self.activity.is_warning = text, warning
        self._notice_until = self.clock() + seconds if text else 0.0

    def _save(self) -> None:
        self.conversation.save(self.status.snapshot().model)
        self._tell(self.history.problem or self.conversation.problem)

    def _save_draft(self) -> None:
        draft = "\n".join(text for text in (self.queued, self.prompt.text) if text.strip())
        if draft != self._draft:
            self._draft = draft
            with contextlib.suppress(HistoryError):  # the conversation's own saving has said what is wrong
                self.history.save_draft(draft)

    def _tell(self, problem: HistoryError | None) -> None:
        """Says once what keeps the conversation from being saved, and keeps two words of it in sight."""
        if problem is not None and self._told is None:
            self.notice(str(problem), warning=True, seconds=10)
        self._told = problem
        self.status_line.warning = "not saved" if problem is not None else ""

    # --- the user: prompts ------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    async def submit(self, event: Prompt.Submitted) -> None:
        if self.is_busy and self.queued:
            self.notice("One prompt is waiting already · F2 takes it back")
            return
        self.prompt.sent(event.text)
        if self._editing is not None:
            index, self._editing = self._editing, None
            self._show_editing()
            self.conversation.cut(index)
            await self.transcript.cut(index)
        if self.is_busy:
            self.queued = event.text
            self._show_queued()
        else:
            await self._send(event.text)

    def _take_back(self) -> None:
        """Puts the prompt that waits back into the box."""
        text, self.queued = self.queued, ""
        self._show_queued()
        self.prompt.put(text)

    def action_edit(self) -> None:
        index = self.conversation.last_prompt
        if self.queued:
            self._take_back()
        elif index is None:
            self.notice("There is no prompt to edit yet")
        elif self._reply is not None or (self.is_busy and self.status.is_ready):
            self.notice("Esc stops the reply; then F2 edits the prompt")
        elif self._editing is None:
            self._editing = index
            self.prompt.put(self.conversation.turns[index].content)
            self._show_editing()

    def _show_editing(self) -> None:
        self.prompt.set_class(self._editing is not None, "-editing")
        self._show_title()

    def _show_title(self) -> None:
        """In the prompt's border: that it edits or, where there is no room elsewhere, the activity."""
        title = EDITING if self._editing is not None else ""
        if self.size.width < TINY_WIDTH:
            title = title or self.activity.notice or describe(self.activity.status)
        if title != self._title:
            self._title = title
            self.prompt.border_title = Content(title)

    # --- the user: the reply ----------------------------------------------------------------------------

    async def action_stop(self) -> None:
        if self._editing is not None:
            self._editing = None
            self._show_editing()
            self.prompt.put("")
        elif self.is_busy and self.status.is_ready:
            self.status.stopping()
            self.run_worker(self.engine.stop())
        elif self.queued:
            self._take_back()
        else:
            self.notice("")

    async def action_regenerate(self) -> None:
        turns = self.conversation.turns
        if self._refuse_while_busy() or not turns:
            return
        replaced = None
        if turns[-1].role == "assistant":
            [replaced] = self.conversation.cut(len(turns) - 1)
            await self.transcript.cut(len(turns))
        if turns:
            turns[-1].note = ""
            await self.transcript.sync(turns[-1])
        self.notice("")
        self._ask(replaced=replaced)

    async def action_go_on(self) -> None:
        turns = self.conversation.turns
        if not turns and self._resumable is not None:
            await self._open(self._resumable)
        elif not turns:
            self.notice("There is no reply to go on with yet")
        elif turns[-1].role == "user":
            await self.action_regenerate()
        elif not self._refuse_while_busy():
            turns[-1].note, turns[-1].finished, turns[-1].streaming = "", False, True
            await self.transcript.sync(turns[-1])
            self.notice("")
            self._ask(reply=turns[-1])

    def _refuse_while_busy(self) -> bool:
        if self.is_busy:
            self.notice(
                "Esc stops the reply first" if self.status.is_ready else "The engine is still starting"
            )
        return self.is_busy

    def action_toggle_thinking(self) -> None:
        self.transcript.unfolded = not self.transcript.unfolded
        self.notice(f"Thinking is {'shown in full' if self.transcript.unfolded else 'folded to one line'}")

    def action_copy_reply(self) -> None:
        reply = self.conversation.last_reply
        self._copy(
            clean(reply.content).strip() if reply else "", "the reply", "There is no reply to copy yet"
        )

    def action_copy_code(self) -> None:
        replies = (turn for turn in reversed(self.conversation.turns) if turn.role == "assistant")
        blocks = (block for reply in replies for block in reversed(code_blocks(clean(reply.content))))
        self._copy(next(blocks, ""), "the code block", "There is no code block to copy yet")

    # --- the user: chats --------------------------------------------------------------------------------

    @work(group="chats", exclusive=True)
    async def action_new_chat(self) -> None:
        await self._open(None)

    @work(group="chats", exclusive=True)
    async def action_past_chats(self) -> None:
        screen = ChatsScreen(self.history, self.conversation.chat_id)
        chosen = await self.push_screen_wait(screen)
        if chosen is not None:
            await self._open(chosen)
        elif self.conversation.chat_id in screen.deleted:
            await self._open(None)

    async def _open(self, chat_id: int | None) -> None:
        """Shows a past chat, or a new one. A reply in progress is stopped first, and kept in its chat."""
        await self._stop_and_wait()
        try:
            self.conversation = Conversation(self.history, self.system, chat_id)
        except HistoryError as error:
            self.notice(str(error), warning=True)
            return
        if self._editing is not None:
            await self.action_stop()
        self.status.new_conversation(context_used=0 if chat_id is None else None)
        await self.transcript.show(self.conversation.turns)
        self.notice("")
        self._show_status()

    async def _stop_and_wait(self) -> None:
        if self.queued:
            self._take_back()
        if self._work is not None and self.status.is_ready:
            work = self._work
            self.status.stopping()
            await self.engine.stop()
            try:
                await asyncio.wait_for(work.wait(), STOP_S)
            except TimeoutError:
                work.cancel()
                self._work = self._reply = None

    def action_export(self) -> None:
        if not self.conversation.turns:
            self.notice("There is nothing to export yet")
            return
        messages = [
            Message(role=t.role, content=t.content, thinking=t.thinking) for t in self.conversation.turns
        ]
        title = one_line(self.conversation.turns[0].content)[:60]
        try:
            path = write_new_file(
                Path.cwd(), title, to_markdown(title, self.status.snapshot().model, messages)
            )
        except ExportError as error:
            self.notice(str(error), warning=True)
        else:
            self.notice(f"Exported to {path}")

    # --- the user: the rest -----------------------------------------------------------------------------

    def _copy(self, text: str, what: str, nothing: str) -> None:
        if text:
            self.copy_to_clipboard(text)
            self.notice(f"Copied {what} ({len(text):,} characters)")
        else:
            self.notice(nothing)

    def copy_to_clipboard(self, text: str) -> None:
        """Copies by OSC 52, which reaches the terminal at the other end of SSH, and under tmux, which by
        default keeps that from programs, by tmux as well."""
        super().copy_to_clipboard(text)
        if "TMUX" in os.environ:
            self.run_worker(_copy_by_tmux(text))

    @on(TextSelected)
    def copy_selection(self) -> None:
        text = self.screen.get_selected_text()
        if text and text.strip():
            self._copy(text, "the selection", "")

    @on(TurnView.LinkClicked)
    def copy_link(self, event: TurnView.LinkClicked) -> None:
        self.copy_to_clipboard(event.address)
        self.notice(f"Copied the link: {event.address}")

    def action_help_quit(self) -> None:
        """Ctrl+C with nothing selected: what people want of it in a terminal is that it stops."""
        if self.is_busy and self.status.is_ready:
            self.call_later(self.action_stop)
        else:
            self.notice("Ctrl+Q quits")

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    async def action_scroll(self, pages: int) -> None:
        page = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * page, animate=False)

    async def action_scroll_to_start(self) -> None:
        await self.transcript.to_start()

    async def action_scroll_to_end(self) -> None:
        await self.transcript.to_end()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for action in ACTIONS:
            help = f"{action.help} ({key_label(action.key)})"
            yield SystemCommand(action.title, help, getattr(self, f"action_{action.name}"))
        yield SystemCommand("Theme", "Choose light, dark and other colours", self.action_change_theme)


def _sentence(failure: Failed) -> str:
    return one_line(f"{failure.message} {failure.hint}")


async def _events(stream: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """An engine's events. One that breaks its promise and raises must not take the conversation with it."""
    try:
        async for event in stream:
            yield event
    except Exception as error:
        yield Failed(kind="internal", message=f"The engine broke off: {type(error).__name__}: {error}.")


async def _copy_by_tmux(text: str) -> None:
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            "tmux", "load-buffer", "-w", "-", stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
        )
        await process.communicate(text.encode(errors="replace"))
