"""The full-screen chat: its layout and what its keys do."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Unpack

from textual import on, work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal
from textual.events import Event, Key, Resize
from textual.screen import ModalScreen, Screen
from textual.theme import ThemeProvider
from textual.timer import Timer
from textual.widget import Widget

from app.chat.chat_options import ChatOptions
from app.chat.export import to_markdown, write_new_file
from app.chat.file_reader import ModelFiles
from app.chat.history import History
from app.chat.history_database import HistoryError
from app.chat.session import Session
from app.cli.left_threads import leave_threads
from app.screens import garbage
from app.screens.actions import ACTIONS, key_label
from app.screens.chat_column import TINY_WIDTH, ChatColumn
from app.screens.context_actions import WAYS, ContextActions
from app.screens.copying import Copying
from app.screens.dashboard import Dashboard
from app.screens.drawn_pictures import DrawnPictures
from app.screens.engine_setup import EngineSetup
from app.screens.file_actions import FileActions
from app.screens.frame_pacer import REST_S, TICK_S, FramePacer
from app.screens.leaving import Leaving
from app.screens.pages.chats import ChatsScreen
from app.screens.pages.help import HelpScreen
from app.screens.pages.system_prompt import Instructions, SystemScreen
from app.screens.palette import Commands, Palette
from app.screens.place_actions import PlaceActions
from app.screens.replaced_files import ReplacedFiles
from app.screens.resuming import Resuming
from app.screens.slash_commands import SlashCommands
from app.screens.tool_actions import ToolActions
from engine.errors import OrinError
from engine.protocol.client import Engine
from engine.protocol.events import Counter
from presets import GUIDE
from widgets.chat.prompt import Prompt
from widgets.dashboard.comparison_pane import ComparisonPane
from widgets.terminal.key_order import KeyOrder
from widgets.terminal.no_color import respect_no_color
from widgets.terminal.paced_output import TerminalKey
from widgets.terminal.terminal_signals import end_with_terminal, suspend_between_events

CHAT_ONLY = ("next_backend", "next_beam", "scroll", "scroll_to_start", "scroll_to_end")
"""Actions with keys that mean something else in a text box. In the chat they have priority; on a page they are off."""
PRIORITY = (*CHAT_ONLY, "quit")
"""Actions with keys that the focused widget does not get."""
WIDE_WIDTH = 110
"""A terminal of this width shows the dashboard beside the chat, a narrower one in its place."""
MEDIUM_HEIGHT = 24
"""A lower terminal leaves out the panes of the machine and the kernels, and what the commands of the palette do."""
FILES_S = 2.0
"""How often the files of the chat are looked at, for changes."""


class ChatApp(
    DrawnPictures,
    Copying,
    Leaving,
    ReplacedFiles,
    Resuming,
    PlaceActions,
    FileActions,
    ToolActions,
    SlashCommands,
    ContextActions,
    KeyOrder,
):
    """A conversation with an engine, saved in a history. The engine is started with the application and closed with it.

    `chat_id` opens a past chat. `initial_prompt` is sent as soon as the engine is ready, and `draft` is in the prompt.
    `theme` is the name of one of Textual's themes; an unknown one is ignored. `warning` is shown at first. `clock`
    gives the seconds for everything that the screen times.
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
    .-tiny ActivityLine.-warning { display: block; padding: 0; max-height: 40%; }
    .-tiny Prompt { margin: 0; }
    .-tiny Transcript { padding: 0; }
    """
    BINDINGS = [
        *(
            Binding(action.keys, action.name, action.title, show=False, priority=action.name in PRIORITY)
            for action in ACTIONS
        ),
        Binding("alt+left", "version(-1)", show=False),
        Binding("alt+right", "version(1)", show=False),
        Binding("pageup", "scroll(-1)", show=False, priority=True),
        Binding("pagedown", "scroll(1)", show=False, priority=True),
        Binding("ctrl+home", "scroll_to_start", show=False, priority=True),
        Binding("ctrl+end", "scroll_to_end", show=False, priority=True),
    ]
    COMMANDS = {Commands}
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (TINY_WIDTH, "-narrow"), (WIDE_WIDTH, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (MEDIUM_HEIGHT, "-medium"), (34, "-tall")]

    def __init__(
        self,
        engine: Engine,
        history: History,
        *,
        chat_id: int | None = None,
        initial_prompt: str = "",
        draft: str = "",
        theme: str = "",
        warning: str = "",
        setup: EngineSetup | None = None,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Unpack[ChatOptions],
    ) -> None:
        super().__init__()
        respect_no_color(self)
        self.history = history
        self.setup = setup
        self.column = column = ChatColumn(clock, lambda: ModelFiles.of(setup.options) if setup else None)
        self.prompt, self.transcript, self.notice = column.prompt, column.transcript, column.notice
        self.session = Session(
            engine,
            history,
            self.column,
            spawn=lambda work: self.run_worker(work, group="engine"),
            clock=clock,
            **options,
        )
        self.session.ways_on = "Ctrl+P begins a new chat with a summary, or makes room in other ways"
        if setup is not None:
            self.session.status.expect(setup.model_path.stem)
            self.session.other_model = f"Ctrl+L chooses another model, such as {GUIDE}, which is built in."
        self.column.session = self.session
        self.session.tools.form = self.tool_form
        self.dashboard = Dashboard(self.session, setup, read_counters)
        self.dashboard.tell = self.notice
        self._first_theme, self.session.flaws, self._open_first = theme, warning, chat_id
        self._send_first, self._first_draft = initial_prompt, draft
        self._pacer = FramePacer()
        self._ticker: tuple[float, Timer] | None = None  # every so many seconds
        self._is_prompt_visible, self._has_dashboard_drawn = True, False
        self.animation_level = "none"

    def get_default_screen(self) -> Screen[None]:
        """Gives the page the classes of its size from the beginning. Textual sets them only after it has styled all."""
        page = super().get_default_screen()
        for size, breakpoints in zip(
            self.size, (self.HORIZONTAL_BREAKPOINTS, self.VERTICAL_BREAKPOINTS), strict=True
        ):
            page.add_class([name for least, name in breakpoints if size >= least][-1], update=False)
        return page

    def compose(self) -> ComposeResult:
        with Horizontal(id="columns"):
            yield self.column
            yield self.dashboard
        yield self.column.status_line

    def on_load(self) -> None:
        leave_threads()  # before the first of them begins

    async def on_mount(self) -> None:
        self.page = self.screen  # `screen` may be another one later
        if self._first_theme in self.available_themes:
            self.theme = self._first_theme
        self.prompt.focus()
        self.column.welcome.remarks = {GUIDE: ("a small model that is built in", "Ctrl+L has larger ones")}
        self.read_history(self._first_draft, offer=self._open_first is None)
        self.show_comparison()
        if self._open_first is not None:
            await self.session.open(self._open_first)
        if self.session.flaws:
            self.notice(self.session.flaws, warning=True)
        self.session.start()
        if self._send_first:
            await self.session.send(self._send_first)
        garbage.postpone()
        self._tick_every(TICK_S)
        self.set_interval(FILES_S, self._look_at_files)
        suspend_between_events(self)
        end_with_terminal(self)

    async def on_unmount(self) -> None:
        self.session.save()
        self.save_draft()
        with contextlib.suppress(HistoryError):
            self.history.set_open(None)
        garbage.resume()
        await self.session.close()

    # --- drawing ----------------------------------------------------------------------------------------

    def _tick_every(self, seconds: float) -> None:
        if self._ticker is None or seconds != self._ticker[0]:
            if self._ticker is not None:
                self._ticker[1].stop()
            self._ticker = seconds, self.set_interval(seconds, self._tick)

    def _tick(self) -> None:
        if not self._pacer.is_due():
            return
        self.call_after_refresh(self._focus_visible)  # a widget that has just been shown has no size
        self.report_download()
        self.transcript.pace(is_slow=self.is_line_slow, is_thin=self.is_line_thin)
        # A frame draws one of the two, since a key waits until the frame is drawn.
        self._has_dashboard_drawn = not self._has_dashboard_drawn and self.dashboard.draw()
        if not self._has_dashboard_drawn:
            self.column.draw()
        self.save_draft_if_due(time.monotonic())
        if not self.session.is_answering and self._pacer.is_idle:
            garbage.collect_if_due()
        self._tick_every(REST_S if self._pacer.is_idle and not self.session.is_busy else TICK_S)

    def _focus_visible(self) -> None:
        """Focuses the prompt when it becomes visible, and never leaves the focus on something that is not visible."""
        focused, was_visible = self.page.focused, self._is_prompt_visible
        # A region has the border too: of a terminal of three columns, the prompt has no more.
        self._is_prompt_visible = bool(self.prompt.region)
        if focused is None or not focused.region or self._is_prompt_visible > was_visible:
            widgets = self.prompt, self.dashboard.table, self.dashboard.graph
            self.page.set_focus(next((widget for widget in widgets if widget.region), None))

    async def on_event(self, event: Event) -> None:
        if isinstance(event, Key) and event.key not in set(TerminalKey):
            self._pacer.key_pressed()
            self.dashboard.tuner.key_pressed()
            if self._ticker is not None:
                self._tick_every(TICK_S)
        await super().on_event(event)

    def on_key(self, event: Key) -> None:
        """Types into the prompt what no other widget has a use for."""
        is_typing = self.page.focused in (self.prompt, self.column.find_bar.field)
        is_outside = self.screen is self.page and not is_typing and self.prompt.region
        if is_outside and event.is_printable and event.key not in self.active_bindings:
            self.prompt.focus()
            self.prompt.insert(event.character or "")

    # --- the reply --------------------------------------------------------------------------------------

    def action_edit(self) -> None:
        self.column.edit()

    def action_stop(self) -> None:
        """Ends the first of these: a pane on the whole screen, a search, editing, files that are read, the reply, a
        switch of engines, the queue."""
        if self.dashboard.whole is not None:
            self._show_whole(None)
        elif self.column.find_bar.is_open:
            self.column.find_bar.action_close()
        elif self.column.editing is not None:
            self.column.leave_editing()
        elif self.column.reading:
            self.column.reading.cancel()
        elif self.session.is_answering:
            self.run_worker(self.session.stop())
        elif self.session.candidate is not None:
            self.notice(f"{self.session.candidate.name} was given up")
            self.session.cancel_switch()
        elif self.session.queued:
            self.session.take_back()
        else:
            self.notice("")

    @on(ComparisonPane.Again)
    async def action_regenerate(self) -> None:
        if self.session.conversation.turns and not self.column.refuse_while_busy():
            self.notice("")
            await self.session.regenerate()

    async def action_go_on(self) -> None:
        turns = self.session.conversation.turns
        if self.session.is_full:
            self.offer_ways_on()
            return
        if not turns:
            if not await self.resume():
                self.notice("There is no reply to go on with yet")
        elif not self.column.refuse_while_busy():
            self.notice("")
            await self.session.go_on()

    def action_toggle_thinking(self) -> None:
        self.transcript.unfold(not self.transcript.unfolded)
        self.notice(f"Thinking is {'shown in full' if self.transcript.unfolded else 'folded to one line'}")

    # --- chats ------------------------------------------------------------------------------------------

    @work(group="chats", exclusive=True)
    async def action_new_chat(self) -> None:
        await self.session.open(None)

    def action_past_chats(self) -> None:
        self.past_chats()

    @work(group="chats", exclusive=True)
    async def past_chats(self, search: str = "", delete: int | None = None) -> None:
        current = self.session.conversation.chat_id
        screen = ChatsScreen(self.history, current, search=search, delete=delete)
        chosen = await self.push_screen_wait(screen)
        if chosen is not None and (chosen != current or screen.search_text):
            await self.open_at(chosen, screen.search_text)
        elif current in screen.deleted:
            await self.session.open(None)

    @work(group="system", exclusive=True)
    async def action_system(self) -> None:
        session = self.session
        now = Instructions(session.conversation.system, session.sampling.effort)
        takes_effort = session.status.snapshot().ready.model.takes_effort
        new = await self.push_screen_wait(SystemScreen(now, takes_effort=takes_effort))
        if new is not None and new.effort != now.effort:
            self.set_effort(new.effort)
            self.notice("The new effort holds from the next prompt on")
        if new is not None and new.system != now.system:
            session.set_system(new.system)
            changed = "The new system prompt holds from the next prompt on"
            self.notice(changed if new.system else "There is no system prompt now")

    def action_export(self) -> None:
        conversation = self.session.conversation
        if not conversation.turns:
            self.notice("There is nothing to export yet")
            return
        title, model = conversation.title, self.session.status.snapshot().ready.model.title
        document = to_markdown(title, model, conversation.all_messages())
        try:
            self.notice(f"Exported to {write_new_file(title, document)}")
        except (OrinError, OSError) as error:
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
        self._show_back_keys()
        if is_shown or self.size.width >= WIDE_WIDTH:
            self.prompt.focus()

    def action_zoom(self) -> None:
        if self.size.width >= TINY_WIDTH:
            self._show_whole(self.dashboard.next_pane)

    def on_resize(self, event: Resize) -> None:
        if event.size.width < TINY_WIDTH and self.dashboard.whole is not None:
            self._show_whole(None)  # there is only room for the chat
        self.call_after_refresh(self._show_back_keys)

    def _show_whole(self, pane: Widget | None) -> None:
        """Shows `pane` of the dashboard on the whole screen, or the chat again (None)."""
        self.page.set_class(pane is not None, "-whole-pane")
        self.dashboard.zoom(pane)
        if pane is None:
            self.prompt.focus()
        self._show_back_keys()

    def _show_back_keys(self) -> None:
        """Names the keys that bring the chat back, while panes take its place."""
        if self.dashboard.whole is not None:
            keys = "F9 next pane  Esc back"
        else:
            is_instead = self.size.width < WIDE_WIDTH and self.page.has_class("-with-dashboard")
            keys = "F9 whole pane  F5 back" if is_instead else ""
        self.column.back_keys = keys
        if keys and not self.column.activity.is_warning:
            self.notice("")  # a notice would hide them
        self.column.show_status()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in CHAT_ONLY and isinstance(self.screen, ModalScreen):
            return False
        return super().check_action(action, parameters)

    # --- the comparison ---------------------------------------------------------------------------------

    def action_compare(self) -> None:
        self.page.remove_class("-with-dashboard")
        self._show_whole(None)
        self.toggle_comparison()
        self.show_comparison()

    @on(ComparisonPane.ModeChanged)
    def _comparison_mode(self) -> None:
        self.toggle_together()

    @on(ComparisonPane.Closed)
    def _leave_comparison(self) -> None:
        if self.session.is_answering:
            self.action_stop()
        else:
            self.action_compare()

    # --- the rest ---------------------------------------------------------------------------------------

    @on(Prompt.NothingToUndo)
    def _name_suspend(self) -> None:
        self.notice("There is nothing to undo · Alt+Z suspends orin-chat")

    def action_suspend(self) -> None:
        """Gives the terminal back to the shell, until `fg`."""
        os.kill(os.getpid(), signal.SIGTSTP)  # see widgets/terminal/terminal_signals

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_scroll(self, pages: int) -> None:
        if self.is_comparing:
            self.column.comparison.scroll_pages(pages)
            return
        lines = max(1, self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=pages * lines, animate=False)

    def action_scroll_to_start(self) -> None:
        self.transcript.to_start()

    def action_scroll_to_end(self) -> None:
        self.transcript.to_end()

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette())

    def search_themes(self) -> None:
        self.push_screen(Palette([ThemeProvider], placeholder="Search for themes…"))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        is_short = self.size.height < MEDIUM_HEIGHT  # then each command has one line (`Commands`)
        commands = (
            *((action.title, action.help, key_label(action.key), action.name) for action in ACTIONS),
            *((way.title, way.help, "", way.name) for way in WAYS),
            ("Theme", "Choose light, dark and other colours", "", "change_theme"),
        )
        for title, help, key, name in commands:
            shown = f"{title} · {key}" if is_short and key else title
            in_full = f"{help} ({key})" if key else help
            yield SystemCommand(shown, in_full, getattr(self, f"action_{name}"))
