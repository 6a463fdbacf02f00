"""The full-screen chat: what its keys do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Unpack

from textual import on, work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal
from textual.events import Event, Key, Resize, TextSelected
from textual.screen import ModalScreen, Screen
from textual.widget import Widget

from app.chat.export import ExportError, to_markdown, write_new_file
from app.chat.history import History, HistoryError
from app.chat.session import ChatOptions, Session
from app.screens.actions import ACTIONS, key_label
from app.screens.chat_column import TINY_WIDTH, ChatColumn
from app.screens.chats import ChatsScreen
from app.screens.clipboard import copy_by_tmux, is_in_tmux
from app.screens.dashboard import Dashboard
from app.screens.edit_page import EditPage
from app.screens.engine_setup import EngineSetup
from app.screens.help import HelpScreen
from app.screens.switching import Switching
from app.screens.system_prompt import SystemScreen
from engine.client import Engine
from engine.events import Counter
from presets import GUIDE
from widgets.comparison_pane import ComparisonPane
from widgets.markdown.parser import code_blocks
from widgets.text import clean
from widgets.transcript import Transcript

OVER_PROMPT = ("next_backend", "next_beam", "scroll", "scroll_to_start", "scroll_to_end")
"""Actions whose keys mean something else in a box of text: there, and in no other screen, they come first."""
FIRST = (*OVER_PROMPT, "quit")
"""Actions whose keys come before those of what has the focus. Quitting does on every page."""
WIDE_WIDTH = 110
"""Wider ones have room for the dashboard beside the chat; on others a key shows it in the chat's place."""
SAVE_S = 1.0
"""How much of a reply a crash may cost."""
FRAME_S = 0.2 if "SSH_CONNECTION" in os.environ else 0.1
"""Text is drawn this often: faster than anyone reads, seldom enough for a slow line."""
MAX_SHARE = 0.2
"""Of a core, for drawing. Where a frame costs more than this leaves room for, there are fewer of them,
but at least one in MAX_FRAME_S."""
MAX_FRAME_S = 1.0
TICK_S = FRAME_S / 4
AFTER_KEY_S, TYPING_S, MAX_TYPING_FRAME_S = 0.03, 0.2, 0.5
"""While someone types, a frame is drawn soon after a key is on the screen, so that the next key need not wait for
one: not before and not long after, but within MAX_TYPING_FRAME_S."""


class ChatApp(App[None]):
    """A conversation with an engine, saved in a history.

    `chat_id` opens a past chat, `initial_prompt` is sent as soon as the engine is ready. `theme` is one of
    Textual's; others are passed over. `clock` gives the seconds for whatever is timed on the screen. The engine is
    started when the application is, and closed with it.
    """

    TITLE = "orin-chat"
    CSS = """
    #columns { height: 1fr; }
    #dashboard { display: none; }
    .-wide #chat { width: 2fr; }
    .-wide #dashboard { display: block; }
    .-without-dashboard #dashboard, .-comparing #dashboard { display: none; }
    .-with-dashboard #dashboard { display: block; }
    .-narrow.-with-dashboard #chat, .-whole-pane #chat { dock: bottom; width: 100%; height: auto; }
    .-narrow.-with-dashboard #chat > *, .-whole-pane #chat > * { display: none; }
    .-narrow.-with-dashboard #chat > ActivityLine, .-whole-pane #chat > ActivityLine { display: block; }
    .-whole-pane #dashboard { display: block; }
    .-tiny #dashboard { display: none; }
    .-short MachinePanel, .-short KernelTable, .-medium MachinePanel { display: none; }
    .-whole-pane .-whole { display: block; }
    .-tiny ActivityLine, .-tiny StatusLine { display: none; }
    .-tiny ActivityLine.-warning { display: block; padding: 0; }
    .-tiny Prompt { margin: 0; }
    .-tiny Transcript { padding: 0; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        *(
            Binding(action.key, action.name, action.title, show=False, priority=action.name in FIRST)
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
        chat_id: int | None = None,
        initial_prompt: str = "",
        theme: str = "",
        setup: EngineSetup | None = None,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Unpack[ChatOptions],
    ) -> None:
        super().__init__()
        self.history = history
        self.setup = setup
        self.column = ChatColumn(clock)
        self.session = Session(
            engine,
            history,
            self.column,
            spawn=lambda work: self.run_worker(work, group="engine"),
            clock=clock,
            **options,
        )
        self.column.attach(self.session)
        self.dashboard = Dashboard(self.session, setup, read_counters)
        self.notice = self.column.notice
        self.switching = Switching(self, self.session, setup, self.notice, self.dashboard.show_presets)
        self._first_theme = theme
        self._open_first = chat_id
        self._send_first = initial_prompt
        self._resumable: int | None = None  # the chat that Ctrl+G opens while this one is empty
        self._frame_at = self._frame_cpu = self._save_at = self._key_at = 0.0
        self._draft = ""
        self._is_prompt_seen = True
        self._has_dashboard_drawn = False
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        with Horizontal(id="columns"):
            yield self.column
            yield self.dashboard
        yield self.column.status_line

    async def on_mount(self) -> None:
        self.page = self.screen  # another may be on top of it later
        if self._first_theme in self.available_themes:
            self.theme = self._first_theme
        self.prompt, self.transcript = self.column.prompt, self.column.transcript
        self.prompt.focus()
        self.column.welcome.remarks = {GUIDE: ("a small model that is built in", "Ctrl+L has larger ones")}
        self._read_history()
        self._show_comparison()
        if self._open_first is not None:
            await self.session.open(self._open_first)
        self.session.start()
        if self._send_first:
            await self.session.send(self._send_first)
        gc.freeze()  # looking through all there is, for what is not needed any more, takes longer than a key may
        self.set_interval(TICK_S, self._frame)
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
            self.column.problem_changed(self.history.problem)
        except HistoryError as error:
            self.column.problem_changed(error)

    # --- drawing and saving -----------------------------------------------------------------------------

    async def _frame(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        since = now - self._frame_at
        if since < max(FRAME_S - TICK_S / 2, min(MAX_FRAME_S, (cpu - self._frame_cpu) / MAX_SHARE)):
            return
        is_next_key_near = not AFTER_KEY_S < now - self._key_at < AFTER_KEY_S + 2 * TICK_S
        if now - self._key_at < TYPING_S and is_next_key_near and since < MAX_TYPING_FRAME_S:
            return
        self._frame_at, self._frame_cpu = now, cpu
        self._focus_what_is_seen()
        self.switching.tell_of_download()
        # One of them a frame, or a key would have to wait for both.
        self._has_dashboard_drawn = not self._has_dashboard_drawn and self.dashboard.draw()
        if not self._has_dashboard_drawn:
            await self.column.draw()
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            if self.session.reply is not None and self.column.problem is None:
                self.session.save()
            self._save_draft()

    def _focus_what_is_seen(self) -> None:
        """What is typed is for the prompt when that comes in sight, and never for what went out of it."""
        focused, was_seen = self.page.focused, self._is_prompt_seen
        self._is_prompt_seen = bool(self.prompt.size)
        if focused is None or not focused.size or self._is_prompt_seen > was_seen:
            seen = (widget for widget in (self.prompt, self.dashboard.table) if widget.size)
            self.page.set_focus(next(seen, None))

    async def on_event(self, event: Event) -> None:
        if isinstance(event, Key):
            self._key_at = time.monotonic()
        await super().on_event(event)

    def on_key(self, event: Key) -> None:
        """What is typed where it means nothing is for the prompt."""
        is_elsewhere = self.screen is self.page and self.page.focused is not self.prompt and self.prompt.size
        if is_elsewhere and event.is_printable and event.key not in self.active_bindings:
            self.prompt.focus()
            self.prompt.insert(event.character or "")

    def _save_draft(self) -> None:
        draft = "\n".join(text for text in (self.session.queued, self.prompt.text) if text.strip())
        if draft != self._draft:
            self._draft = draft
            with contextlib.suppress(HistoryError):  # the conversation's own saving says what is wrong
                self.history.save_draft(draft)

    # --- the reply --------------------------------------------------------------------------------------

    def action_edit(self) -> None:
        self.column.edit()

    def action_stop(self) -> None:
        """What is nearest: a whole pane, the editing, the reply, an engine on its way, a prompt that waits."""
        if self.dashboard.whole is not None:
            self._show_whole(None)
        elif self.column.editing is not None:
            self.column.leave_editing()
        elif self.session.is_answering:
            self.run_worker(self.session.stop())
        elif self.session.candidate is not None:
            self.notice(f"{self.session.candidate.name} is given up")
            self.session.cancel_switch()
        elif self.session.queued:
            self.session.take_back()
        else:
            self.notice("")

    @on(ComparisonPane.Again)
    async def action_regenerate(self) -> None:
        if self.session.conversation.turns and not self._refuse_while_busy():
            self.notice("")
            await self.session.regenerate()

    async def action_go_on(self) -> None:
        turns = self.session.conversation.turns
        if not turns and self._resumable is not None:
            chat_id, self._resumable = self._resumable, None
            await self.session.open(chat_id)
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

    # --- chats ------------------------------------------------------------------------------------------

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

    @work(group="system", exclusive=True)
    async def action_system(self) -> None:
        system = await self.push_screen_wait(SystemScreen(self.session.conversation.system))
        if system is not None and system != self.session.conversation.system:
            self.session.set_system(system)
            new, none = "The new system prompt holds from the next prompt on", "There is no system prompt now"
            self.notice(new if system else none)

    def action_export(self) -> None:
        conversation = self.session.conversation
        if not conversation.turns:
            self.notice("There is nothing to export yet")
            return
        title, model = conversation.title, self.session.status.snapshot().model
        document = to_markdown(title, model, conversation.all_messages())
        try:
            self.notice(f"Exported to {write_new_file(Path.cwd(), title, document)}")
        except (ExportError, OSError) as error:
            self.notice(str(error), warning=True)

    # --- the dashboard ----------------------------------------------------------------------------------

    def action_dashboard(self) -> None:
        if self.size.width < TINY_WIDTH:
            self.notice(f"The dashboard needs {TINY_WIDTH} columns")
            return
        if self.dashboard.whole is not None:
            self._show_whole(None)
        is_shown = self.dashboard.display and self.dashboard.size.width > 0
        self.page.set_class(not is_shown, "-with-dashboard")
        self.page.set_class(is_shown and self.size.width >= WIDE_WIDTH, "-without-dashboard")
        self._show_way_back()
        if is_shown or self.size.width >= WIDE_WIDTH:
            self.prompt.focus()

    def action_zoom(self) -> None:
        if self.size.width >= TINY_WIDTH:
            self._show_whole(self.dashboard.next_pane)

    def on_resize(self, event: Resize) -> None:
        if event.size.width < TINY_WIDTH and self.dashboard.whole is not None:
            self._show_whole(None)  # there is room for the chat alone
        self.call_after_refresh(self._show_way_back)

    def _show_whole(self, pane: Widget | None) -> None:
        """Gives `pane` of the dashboard the screen; None: the chat is back."""
        self.page.set_class(pane is not None, "-whole-pane")
        self.dashboard.zoom(pane)
        if pane is None:
            self.prompt.focus()
        self._show_way_back()

    def _show_way_back(self) -> None:
        """The keys that bring the chat back, where panes have its place."""
        if self.dashboard.whole is not None:
            keys = "F9 next pane  Esc back"
        else:
            is_instead = self.size.width < WIDE_WIDTH and self.page.has_class("-with-dashboard")
            keys = "F9 whole pane  F5 back" if is_instead else ""
        self.column.way_back = keys
        if keys and not self.column.activity.is_warning:
            self.notice("")  # which would have their place
        self.column.show_status()

    # --- other engines ----------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in OVER_PROMPT and isinstance(self.screen, ModalScreen):
            return False
        return super().check_action(action, parameters)

    def action_next_backend(self) -> None:
        self.switching.next_backend()

    def action_next_beam(self) -> None:
        self.switching.next_beam()

    @work(group="presets", exclusive=True)
    async def action_presets(self) -> None:
        await self.switching.choose_preset()

    @work(group="models", exclusive=True)
    async def action_models(self) -> None:
        await self.switching.choose_model()

    def action_compare(self) -> None:
        self.page.remove_class("-with-dashboard")
        self._show_whole(None)
        self.switching.compare()
        self._show_comparison()

    def _show_comparison(self) -> None:
        """In the chat's place and, where that is not asked for by its key, in that of the dashboard."""
        self.column.show_status()
        self.page.set_class(self.switching.is_comparing, "-comparing")

    @on(ComparisonPane.ModeChanged)
    def answer_together(self) -> None:
        self.switching.answer_together()

    @on(ComparisonPane.Closed)
    def leave_comparison(self) -> None:
        if self.session.is_answering:
            self.action_stop()
        else:
            self.action_compare()

    # --- copying ----------------------------------------------------------------------------------------

    def action_copy_reply(self) -> None:
        reply = self.session.conversation.last_reply
        text = clean(reply.content).strip() if reply else ""
        self._copy(text, "the reply", "There is no reply to copy yet")

    def action_copy_code(self) -> None:
        replies = (turn for turn in reversed(self.session.conversation.turns) if turn.role == "assistant")
        blocks = (block for reply in replies for block in reversed(code_blocks(clean(reply.content))))
        self._copy(next(blocks, ""), "the code block", "There is no code block to copy yet")

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

    @on(Transcript.LinkClicked)
    def copy_link(self, event: Transcript.LinkClicked) -> None:
        self._copy(event.address, f"the link {event.address}")

    # --- the rest ---------------------------------------------------------------------------------------

    def action_help_quit(self) -> None:
        """Ctrl+C with nothing selected: what people want of it in a terminal is that it stops."""
        if self.session.is_answering:
            self.action_stop()
        else:
            self.notice("Ctrl+Q quits")

    async def action_quit(self) -> None:
        """Leaves; a page with edits that are not saved comes to the front first, and asks."""
        for page in reversed(self.screen_stack):
            if isinstance(page, EditPage) and not page.may_be_lost("Ctrl+Q"):
                while self.screen is not page:
                    await self.screen.dismiss(None)
                return
        await super().action_quit()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_scroll(self, pages: int) -> None:
        if self.switching.is_comparing:
            self.column.comparison.scroll_pages(pages)
            return
        lines = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * lines, animate=False)

    async def action_scroll_to_start(self) -> None:
        self.transcript.to_start()

    async def action_scroll_to_end(self) -> None:
        self.transcript.to_end()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for action in ACTIONS:
            help = f"{action.help} ({key_label(action.key)})"
            yield SystemCommand(action.title, help, getattr(self, f"action_{action.name}"))
        yield SystemCommand("Theme", "Choose light, dark and other colours", self.action_change_theme)
