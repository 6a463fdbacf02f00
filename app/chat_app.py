"""The full-screen chat: what keys do, and what the screen shows of a session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on, work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import TextSelected
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from app.actions import ACTIONS, key_label
from app.clipboard import copy_by_tmux, is_in_tmux
from app.dashboard import Dashboard
from app.export import ExportError, to_markdown, write_new_file
from app.history import History, HistoryError
from app.screens.chats import ChatsScreen
from app.screens.help import HelpScreen
from app.screens.presets import PresetsScreen
from app.session import Session
from app.settings import remember_model
from app.setup import Setup
from engine.client import Engine
from engine.errors import OrinError, UsageError
from engine.events import Chat, Counter, Message, Sampling
from widgets.activity_line import ActivityLine, describe
from widgets.engine_status import Phase
from widgets.prompt import Prompt
from widgets.reply_markdown import code_blocks
from widgets.status_line import StatusLine
from widgets.text import clean, one_line
from widgets.transcript import Transcript
from widgets.turn import Turn
from widgets.turn_view import TurnView
from widgets.welcome import Welcome

if TYPE_CHECKING:
    from app.downloading import Download

OVER_PROMPT = ("next_backend", "next_beam")
"""Actions whose keys mean something else in a box of text: there, and in no other screen, they come first."""
PLACEHOLDER = "Ask anything · Enter sends · Ctrl+J new line · F1 keys"
EDITING = "editing · Enter sends it in place of the old one and what follows · Esc leaves it"
TINY_WIDTH = 40
"""Narrower terminals show the chat and the prompt only."""
WIDE_WIDTH = 110
"""Wider ones have room for the dashboard beside the chat; on others a key shows it in the chat's place."""
NOTICE_S = 5.0
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
    #dashboard { display: none; }
    .-wide #chat { width: 2fr; }
    .-wide #dashboard { display: block; }
    .-without-dashboard #dashboard { display: none; }
    .-with-dashboard #dashboard { display: block; }
    .-narrow.-with-dashboard #chat, .-whole-pane #chat { display: none; }
    .-whole-pane #dashboard { display: block; }
    .-tiny #dashboard { display: none; }
    .-short MachinePanel, .-short KernelTable, .-medium MachinePanel { display: none; }
    .-whole-pane .-whole { display: block; }
    .-tiny ActivityLine, .-tiny StatusLine { display: none; }
    .-tiny Prompt { margin: 0; }
    .-tiny Transcript { padding: 0; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        *(
            Binding(action.key, action.name, action.title, show=False, priority=action.name in OVER_PROMPT)
            for action in ACTIONS
        ),
        Binding("pageup", "scroll(-1)", show=False, priority=True),
        Binding("pagedown", "scroll(1)", show=False, priority=True),
        Binding("ctrl+home", "scroll_to_start", show=False, priority=True),
        Binding("ctrl+end", "scroll_to_end", show=False, priority=True),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (TINY_WIDTH, "-narrow"), (WIDE_WIDTH, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (24, "-medium"), (34, "-tall")]  # noqa: RUF012

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
        setup: Setup | None = None,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.history = history
        self.clock = clock
        self.session = Session(
            engine,
            history,
            self,
            spawn=lambda work: self.run_worker(work, group="engine"),
            sampling=sampling,
            system=system,
            max_tokens=max_tokens,
            think=think,
            clock=clock,
        )
        self.setup = setup
        self.dashboard = Dashboard(self.session, setup, read_counters)
        self._open_first = chat_id
        self._send_first = initial_prompt
        self._resumable: int | None = None  # the chat that Ctrl+G opens while this one is empty
        self._editing: int | None = None  # index of the turn that the prompt box replaces
        self._frame_at = self._frame_cpu = self._save_at = self._notice_until = 0.0
        self._draft = self._title = ""
        self._problem: HistoryError | None = None
        self._download: Download | None = None  # of a model, which goes on beside the chat
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        with Horizontal(id="columns"):
            with Vertical(id="chat"):
                yield Welcome()
                yield Transcript()
                yield ActivityLine()
                yield Static(id="queued", markup=False)
                yield Prompt(PLACEHOLDER)
            yield self.dashboard
        yield StatusLine()

    async def on_mount(self) -> None:
        # Looked up once: `query_one` looks into the screen on top, which may be another by then.
        self.column = self.query_one("#chat")
        self.welcome = self.query_one(Welcome)
        self.transcript = self.query_one(Transcript)
        self.activity = self.query_one(ActivityLine)
        self.waiting = self.query_one("#queued", Static)
        self.prompt = self.query_one(Prompt)
        self.status_line = self.query_one(StatusLine)
        self.prompt.focus()
        self._read_history()
        if self._open_first is not None:
            await self.session.open(self._open_first)
        self.session.start()
        if self._send_first:
            await self.session.send(self._send_first)
        self.set_interval(FRAME_S, self._frame)
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no signals outside the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)

    async def on_unmount(self) -> None:
        self.session.save()
        self._save_draft()
        await self.session.close()

    def _read_history(self) -> None:
        """Earlier prompts, a draft left behind, a reply that was interrupted, or that there is no history."""
        try:
            self.prompt.remember(self.history.prompts())
            self.prompt.put(self.history.take_draft())
            recent = self.history.chats(limit=1)
            if recent and recent[0].interrupted and self._open_first is None:
                self._resumable = recent[0].id
                self.notice(f"The reply in “{recent[0].title}” was interrupted · Ctrl+G opens it", seconds=60)
            self.problem_changed(self.history.problem)
        except HistoryError as error:
            self.problem_changed(error)

    # --- what the session tells (app.session.View) ------------------------------------------------------

    async def added(self, turn: Turn) -> None:
        await self.transcript.add(turn)
        if turn.role == "user":
            await self.transcript.to_end()
        self._show_status()

    async def changed(self, turn: Turn) -> None:
        await self.transcript.sync(turn)
        self._show_status()

    async def cut(self, index: int) -> None:
        await self.transcript.cut(index)

    async def opened(self) -> None:
        self._end_editing()
        await self.transcript.show(self.session.conversation.turns)
        self._show_status()

    def queue_changed(self) -> None:
        first = f"⏎ next: {one_line(self.session.queued)}"
        shown = Content(first).truncate(max(20, self.size.width - 24), ellipsis=True)
        self.waiting.update(shown.append(Content.styled("  F2 takes it back", "$foreground 60%")))
        self.waiting.set_class(bool(self.session.queued), "-waiting")

    def give_back(self, text: str) -> None:
        self.prompt.put(text)

    def notice(self, text: str, *, warning: bool = False, seconds: float | None = None) -> None:
        """Says something in the line above the prompt, for `seconds`; warnings stay until the next thing."""
        self.activity.notice, self.activity.is_warning = text, warning
        stays = seconds or (0.0 if warning else NOTICE_S)
        self._notice_until = self.clock() + stays if text and stays else 0.0

    def problem_changed(self, problem: HistoryError | None) -> None:
        """Says it once, and keeps two words of it in sight."""
        if problem is not None and self._problem is None:
            self.notice(str(problem), warning=True, seconds=10)
        self._problem = problem
        self.status_line.warning = "not saved" if problem is not None else ""

    # --- drawing and saving -----------------------------------------------------------------------------

    async def _frame(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        if now - self._frame_at < min(MAX_FRAME_S, (cpu - self._frame_cpu) / MAX_SHARE):
            return
        self._frame_at, self._frame_cpu = now, cpu
        self._tell_of_download()
        reply = self.session.reply
        if reply is not None:
            await self.transcript.sync(reply)
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            if reply is not None and self._problem is None:
                self.session.save()
            self._save_draft()
        if self._notice_until and self.clock() >= self._notice_until:
            self.notice("")
        self._show_status()

    def _show_status(self) -> None:
        status = self.session.status.snapshot()
        self.status_line.status = self.activity.status = self.welcome.status = status
        self.column.set_class(not self.session.conversation.turns, "-empty")
        is_idle = status.phase in (Phase.READY, Phase.GONE)
        stops = "Esc stops" if self.session.is_answering else ""
        self.activity.hint = "F1 keys  Ctrl+P commands" if is_idle else stops
        if (candidate := self.session.candidate) is not None and not self.session.is_answering:
            self.notice(
                f"{candidate.name}: {describe(candidate.status.snapshot())} · Esc gives it up", seconds=2
            )
        self._show_title()

    def _show_title(self) -> None:
        """In the prompt's border: that it edits or, where there is no room elsewhere, the activity."""
        title = EDITING if self._editing is not None else ""
        if self.size.width < TINY_WIDTH:
            title = title or self.activity.notice or describe(self.activity.status)
        if title != self._title:
            self._title = title
            self.prompt.border_title = Content(title)

    def _save_draft(self) -> None:
        draft = "\n".join(text for text in (self.session.queued, self.prompt.text) if text.strip())
        if draft != self._draft:
            self._draft = draft
            with contextlib.suppress(HistoryError):  # the conversation's own saving says what is wrong
                self.history.save_draft(draft)

    # --- the user: prompts ------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    async def submit(self, event: Prompt.Submitted) -> None:
        if self.session.is_busy and self.session.queued:
            self.notice("One prompt is waiting already · F2 takes it back")
            return
        index = self._editing
        self._end_editing()
        self.prompt.sent(event.text)
        await self.session.send(event.text, in_place_of=index)

    def action_edit(self) -> None:
        index = self.session.conversation.last_prompt
        if self.session.queued:
            self.session.take_back()
        elif index is None:
            self.notice("There is no prompt to edit yet")
        elif self.session.is_answering:
            self.notice("Esc stops the reply; then F2 edits the prompt")
        elif self._editing is None:
            self._editing = index
            self.prompt.put(self.session.conversation.turns[index].content)
            self.prompt.add_class("-editing")
            self._show_title()

    def _end_editing(self) -> None:
        self._editing = None
        self.prompt.remove_class("-editing")
        self._show_title()

    # --- the user: the reply ----------------------------------------------------------------------------

    def action_stop(self) -> None:
        if self.dashboard.whole is not None:
            self._show_whole(None)
        elif self._editing is not None:
            self._end_editing()
            self.prompt.put("")
        elif self.session.is_answering:
            self.run_worker(self.session.stop())
        elif self.session.candidate is not None:
            self.notice(f"{self.session.candidate.name} is given up")
            self.session.cancel_switch()
        elif self.session.queued:
            self.session.take_back()
        else:
            self.notice("")

    async def action_regenerate(self) -> None:
        if self.session.conversation.turns and not self._refuse_while_busy():
            self.notice("")
            await self.session.regenerate()

    async def action_go_on(self) -> None:
        turns = self.session.conversation.turns
        if not turns and self._resumable is not None:
            await self.session.open(self._resumable)
        elif not turns:
            self.notice("There is no reply to go on with yet")
        elif turns[-1].role == "user":
            await self.action_regenerate()
        elif not self._refuse_while_busy():
            self.notice("")
            await self.session.go_on()

    def _refuse_while_busy(self) -> bool:
        if self.session.is_busy:
            answering = self.session.is_answering
            self.notice("Esc stops the reply first" if answering else "The engine is still starting")
        return self.session.is_busy

    def action_toggle_thinking(self) -> None:
        self.transcript.unfolded = not self.transcript.unfolded
        self.notice(f"Thinking is {'shown in full' if self.transcript.unfolded else 'folded to one line'}")

    def action_copy_reply(self) -> None:
        reply = self.session.conversation.last_reply
        text = clean(reply.content).strip() if reply else ""
        self._copy(text, "the reply", "There is no reply to copy yet")

    def action_copy_code(self) -> None:
        replies = (turn for turn in reversed(self.session.conversation.turns) if turn.role == "assistant")
        blocks = (block for reply in replies for block in reversed(code_blocks(clean(reply.content))))
        self._copy(next(blocks, ""), "the code block", "There is no code block to copy yet")

    # --- the user: chats --------------------------------------------------------------------------------

    @work(group="chats", exclusive=True)
    async def action_new_chat(self) -> None:
        await self.session.open(None)

    @work(group="chats", exclusive=True)
    async def action_past_chats(self) -> None:
        current = self.session.conversation.chat_id
        screen = ChatsScreen(self.history, current)
        chosen = await self.push_screen_wait(screen)
        if chosen is not None and chosen != current:
            await self.session.open(chosen)
        elif current in screen.deleted:
            await self.session.open(None)

    def action_export(self) -> None:
        turns = self.session.conversation.turns
        if not turns:
            self.notice("There is nothing to export yet")
            return
        messages = [Message(role=t.role, content=t.content, thinking=t.thinking) for t in turns]
        title = one_line(turns[0].content)[:60]
        document = to_markdown(title, self.session.status.snapshot().model, messages)
        try:
            self.notice(f"Exported to {write_new_file(Path.cwd(), title, document)}")
        except (ExportError, OSError) as error:
            self.notice(str(error), warning=True)

    # --- the user: the dashboard and the engine ---------------------------------------------------------

    def action_dashboard(self) -> None:
        screen = self.dashboard.screen
        if self.size.width < TINY_WIDTH:
            self.notice(f"The dashboard needs {TINY_WIDTH} columns")
            return
        if self.dashboard.whole is not None:
            self._show_whole(None)
        is_shown = self.dashboard.display and self.dashboard.size.width > 0
        screen.set_class(not is_shown, "-with-dashboard")
        screen.set_class(is_shown, "-without-dashboard")
        if is_shown or self.size.width >= WIDE_WIDTH:
            self.prompt.focus()

    def action_zoom(self) -> None:
        if self.size.width >= TINY_WIDTH:
            self._show_whole(self.dashboard.next_pane)

    def _show_whole(self, pane: Widget | None) -> None:
        """Gives `pane` of the dashboard the screen; None: the chat is back."""
        self.dashboard.screen.set_class(pane is not None, "-whole-pane")
        self.dashboard.zoom(pane)
        if pane is None:
            self.prompt.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in OVER_PROMPT and isinstance(self.screen, ModalScreen):
            return False
        return super().check_action(action, parameters)

    def action_next_backend(self) -> None:
        self._switch(lambda setup: setup.next_backend())

    def action_next_beam(self) -> None:
        self._switch(lambda setup: setup.next_beam())

    @work(group="presets", exclusive=True)
    async def action_presets(self) -> None:
        if self.setup is None:
            self.notice("This engine has no presets")
        elif chosen := await self.push_screen_wait(PresetsScreen(self.setup)):
            self._switch(lambda _: chosen)

    @work(group="models", exclusive=True)
    async def action_models(self) -> None:
        """Goes over to another model, with the conversation kept."""
        if (setup := self.setup) is None:
            self.notice("This engine has no other models")
            return
        from app.screens.models import ModelsScreen  # and numpy: not before they are needed

        backend = setup.options.backend
        screen = ModelsScreen(setup.models, setup.model_path, backend=backend, download=self._download)
        chosen = await self.push_screen_wait(screen)
        self._download = screen.download
        if chosen is None or chosen.path is None or chosen.path == setup.model_path:
            return
        path, name = chosen.path, one_line(chosen.name)
        engine, options = setup.with_model(path, chosen.context_length)

        def adopt() -> None:
            setup.adopt(setup.name, options)
            remember_model(str(path) if isinstance(chosen.source, Path) else chosen.name)
            self.dashboard.show_presets()
            self._count_tokens(path)

        self.session.switch(engine, name, adopt)

    @work(group="count", exclusive=True)
    async def _count_tokens(self, model: Path) -> None:
        """How much of the context the conversation takes, in the words and the template of another model."""
        session = self.session
        if not session.conversation.turns:
            return
        from engine.formats.prompt import tokens_in

        prompt = Chat(messages=session.conversation.messages(), think=session.think)
        with contextlib.suppress(OrinError):  # the next prompt will say it better
            tokens = await asyncio.to_thread(tokens_in, prompt, model)
            if not session.is_busy and self.setup and self.setup.model_path == model:
                session.status.new_conversation(context_used=tokens)

    def _tell_of_download(self) -> None:
        """That a download has come to its end, which the screen of models left going on."""
        if self._download is not None and self._download.is_over and len(self.screen_stack) == 1:
            download, self._download = self._download, None
            if download.error is not None:
                self.notice(f"{download.name}: {download.error}", warning=True)
            elif download.path is not None:
                self.notice(f"{download.name} is here · Ctrl+L chooses it", seconds=60)

    def _switch(self, choose: Callable[[Setup], str]) -> None:
        """Goes over to an engine under another preset, with the conversation kept."""
        if (setup := self.setup) is None:
            self.notice("This engine has no presets")
            return
        try:
            name = choose(setup)
            engine, options, sampling = setup.engine(name)
        except UsageError as error:
            self.notice(str(error), warning=True)
            return

        def adopt() -> None:
            setup.adopt(name, options)
            self.session.sampling = sampling
            self.dashboard.show_presets()

        self.session.switch(engine, name, adopt)

    # --- the user: the rest -----------------------------------------------------------------------------

    def _copy(self, text: str, what: str, nothing: str = "") -> None:
        if text:
            self.copy_to_clipboard(text)
        self.notice(f"Copied {what} ({len(text):,} characters)" if text else nothing)

    def copy_to_clipboard(self, text: str) -> None:
        super().copy_to_clipboard(text)
        if is_in_tmux():
            self.run_worker(copy_by_tmux(text))

    @on(TextSelected)
    def copy_selection(self) -> None:
        text = self.screen.get_selected_text()
        if text and text.strip():
            self._copy(text, "the selection")

    @on(TurnView.LinkClicked)
    def copy_link(self, event: TurnView.LinkClicked) -> None:
        self._copy(event.address, f"the link {event.address}")

    def action_help_quit(self) -> None:
        """Ctrl+C with nothing selected: what people want of it in a terminal is that it stops."""
        if self.session.is_answering:
            self.action_stop()
        else:
            self.notice("Ctrl+Q quits")

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_scroll(self, pages: int) -> None:
        lines = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * lines, animate=False)

    async def action_scroll_to_start(self) -> None:
        await self.transcript.to_start()

    async def action_scroll_to_end(self) -> None:
        await self.transcript.to_end()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for action in ACTIONS:
            help = f"{action.help} ({key_label(action.key)})"
            yield SystemCommand(action.title, help, getattr(self, f"action_{action.name}"))
        yield SystemCommand("Theme", "Choose light, dark and other colours", self.action_change_theme)
