"""The column of the conversation, from the transcript to the prompt: shows a session."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.widgets import Static, TextArea

from app.chat.commands import split
from app.chat.file_reader import ModelFiles, Takes
from app.chat.files import refuse_pictures
from app.chat.history_database import HistoryError
from app.chat.session import Session
from app.chat.view import Permission, View
from app.comparison.comparison_engine import ComparisonEngine
from app.screens import garbage
from app.screens.find_bar import FindBar
from app.screens.typing_help import TypingHelp
from engine.errors import OrinError
from widgets.chat.activity_line import ActivityLine, status_text
from widgets.chat.prompt import Prompt
from widgets.chat.status_line import StatusLine, tiny_status
from widgets.chat.tool_question import ToolQuestion
from widgets.chat.transcript import Transcript
from widgets.chat.turn import Attachment, Call, Turn
from widgets.chat.welcome import Welcome
from widgets.dashboard.comparison_pane import ComparisonPane
from widgets.engine_status import Phase
from widgets.terminal.pastes import MOST_PASTED
from widgets.text import longest_fitting, one_line

PLACEHOLDERS = (
    "Ask anything · Enter sends · Ctrl+J new line · F1 keys",
    "Ask anything · F1 shows the keys",
    "Ask anything",
)
EDITING = (
    "editing · Enter replaces this prompt and all after it · F2 edits the one before · Esc leaves it",
    "editing · Enter replaces it and all after it · F2 the one before · Esc",
    "editing · Enter replaces · F2 the one before · Esc",
    "editing · Esc leaves it",
)
SYSTEM_SET = ("system prompt · F12", "system")
TINY_WIDTH = 40
"""A narrower terminal shows only the conversation and the prompt, whose border has the most important figures."""
NOTICE_S = 5.0
Reading: TypeAlias = asyncio.Future[tuple[tuple[Attachment, ...], str]]
_BOX, _BORDER = 8, 6  # cells of the prompt's box that a text in it or in its border cannot use


class ChatColumn(View, Vertical):
    """Shows `session`, which is set later. `draw` shows what has grown since the last frame. The `status_line`
    belongs at the foot of the screen, so the application composes it."""

    DEFAULT_CSS = """
    ChatColumn { width: 1fr; }
    ChatColumn > .-absent { display: none; }
    ChatColumn #queued {
        display: none; height: 1; padding: 0 2; color: $text-accent; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ChatColumn #queued.-waiting { display: block; }
    ChatColumn #files { display: none; height: auto; max-height: 3; padding: 0 2; }
    ChatColumn #files.-shown { display: block; }
    ChatColumn Prompt { margin: 0 1; }
    """
    session: Session

    @dataclass
    class Commanded(Message):
        """The user sent the command /`name`."""

        name: str
        argument: str

    def __init__(self, clock: Callable[[], float], model: Callable[[], ModelFiles | None]) -> None:
        """`model` returns the files of the model in use, whose tokens are counted."""
        super().__init__(id="chat")
        self.clock = clock
        self.problem: HistoryError | None = None  # why the conversation is not saved
        self.editing: int | None = None  # the index of the turn that the prompt replaces
        self.reading: Reading | None = None  # the files of a prompt, before it is sent
        self.back_keys = ""  # the keys that bring the chat back, while panes take its place
        self._draft = ""  # what the prompt held before the editing
        self._notice_until = 0.0
        self._title = ""
        self._subtitle = Content("")
        # Made here, since `query_one` searches the screen on top, which may be another one.
        self.welcome, self.transcript, self.comparison = Welcome(), Transcript(), ComparisonPane()
        self.transcript.add_class("-absent")
        self.comparison.add_class("-absent")
        self.find_bar = FindBar(self.transcript)
        self.activity, self.prompt = ActivityLine(), Prompt(PLACEHOLDERS[0])
        self.typing = TypingHelp(self, self.prompt, model, self._takes)
        self.queued = Static(id="queued", markup=False)
        self.question = ToolQuestion()
        self.status_line = StatusLine()

    def compose(self) -> ComposeResult:
        yield from (self.welcome, self.transcript, self.comparison, self.find_bar, self.activity, self.queued)
        yield from (self.question, self.prompt.suggestions, self.typing.chips, self.prompt)

    def on_resize(self, event: Resize) -> None:
        self.prompt.placeholder = longest_fitting(PLACEHOLDERS, event.size.width - _BOX)

    # --- what the session reports (app.chat.view.View) -----------------------------------------------

    async def added(self, turn: Turn) -> None:
        self.transcript.add(turn)
        if turn.role == "user":
            self.transcript.to_end()
        self.show_status()

    async def changed(self, turn: Turn) -> None:
        self.transcript.sync(turn)
        self.show_status()

    async def cut(self, index: int) -> None:
        self.transcript.cut(index)

    async def opened(self) -> None:
        self.end_editing()
        if self.reading:
            self.reading.cancel()
        if self.find_bar.is_open:
            self.find_bar.action_close()
        if isinstance(pair := self.session.engine, ComparisonEngine):
            pair.forget()
        self.transcript.show(self.session.conversation.turns)
        for turn in self.session.conversation.turns:
            self.typing.reader.remember(turn.files)
        garbage.forget_survivors()  # the turns of another chat
        self.show_status()

    def queue_changed(self) -> None:
        text = Content(f"⏎ next: {one_line(self.session.queued)}")
        text = text.truncate(max(20, self.size.width - 24), ellipsis=True)
        self.queued.update(text + Content.styled("  F2 takes it back", "$foreground 60%"))
        self.queued.set_class(bool(self.session.queued), "-waiting")

    def give_back(self, text: str) -> None:
        self.prompt.put(text)

    def notice(self, text: str, *, warning: bool = False, seconds: float | None = None) -> None:
        """Shows a line above the prompt for `seconds`. A warning stays until the next notice."""
        self.activity.notice, self.activity.is_warning = text, warning
        duration_s = seconds or (0.0 if warning else NOTICE_S)
        self._notice_until = self.clock() + duration_s if text and duration_s else 0.0

    async def may_run(self, call: Call) -> Permission:
        return cast(Permission, await self.question.ask(call.name))

    def problem_changed(self, problem: HistoryError | None) -> None:
        """Shows the problem once, and two words in the status line for as long as it lasts."""
        if problem is not None and self.problem is None:
            self.notice(str(problem), warning=True, seconds=10)
        self.problem = problem
        self.status_line.warning = "not saved" if problem is not None else ""

    # --- drawing ----------------------------------------------------------------------------------------

    def draw(self) -> None:
        if (reply := self.session.reply) is not None:
            self.transcript.sync(reply)
        if self._notice_until and self.clock() >= self._notice_until:
            self.notice("")
        self.show_status()

    def show_status(self) -> None:
        session, status = self.session, self.session.status.snapshot()
        self.activity.status = self.welcome.status = self.status_line.status = status
        pair = session.engine if isinstance(session.engine, ComparisonEngine) else None
        shown = self.comparison if pair else self.transcript if session.conversation.turns else self.welcome
        for widget in (self.welcome, self.transcript, self.comparison):
            widget.set_class(widget is not shown, "-absent")  # a class of the column would restyle all it has
        if pair is not None:
            self.comparison.data = pair.view()
        is_working = status.phase in (Phase.PREFILLING, Phase.GENERATING)
        self.activity.activity = pair.doing if pair and is_working else session.tools.doing
        is_idle = status.phase in (Phase.READY, Phase.GONE) and not session.tools.doing
        keys = "F1 keys  Ctrl+P commands" if is_idle else "Esc stops" if session.is_answering else ""
        if session.is_answering and session.candidate is not None:
            keys = f"then {session.candidate.name} answers  {keys}"
        below = "" if self.transcript.is_following else "↓ more below  Ctrl+End"
        self.activity.hint = self.back_keys or below or keys
        if (candidate := session.candidate) is not None and not session.is_answering:
            progress = status_text(candidate.status.snapshot())
            self.notice(f"{candidate.name}: {progress} · Esc gives it up", seconds=2)
        if not session.is_answering:
            self.typing.model_changed()
        self._show_title()

    def _show_title(self) -> None:
        """The border of the prompt says that it edits, and that there is a system prompt; on a tiny terminal, it says
        what the activity line and the status line would."""
        title = (
            longest_fitting(EDITING, self.size.width - _BOX) if self.editing is not None else self.prompt.mode
        )
        has_system = bool(self.session.conversation.system)
        subtitle = Content(longest_fitting(SYSTEM_SET, self.size.width - _BOX) if has_system else "")
        if self.app.size.width < TINY_WIDTH:
            room = self.app.size.width - _BORDER
            title = title or self.activity.notice or self.activity.text
            if has_system and len(titled := f"{title} · {SYSTEM_SET[-1]}") <= room:
                title = titled
            subtitle = tiny_status(self.status_line.status, room, self.status_line.warning)
        if title != self._title:
            self._title = title
            self.prompt.border_title = Content(title)
        if not subtitle.is_same(self._subtitle):
            self._subtitle = subtitle
            self.prompt.border_subtitle = subtitle

    # --- prompts ----------------------------------------------------------------------------------------

    def refuse_while_busy(self) -> bool:
        """Whether the engine starts or answers; says so."""
        if self.session.is_answering:
            self.notice("Esc stops the reply first")
        elif self.session.is_busy:
            self.notice("The engine is still starting")
        return self.session.is_busy

    @on(TextArea.Changed)
    def _text_changed(self) -> None:
        self.typing.text_changed()

    @on(TextArea.SelectionChanged)
    def _cursor_moved(self) -> None:
        self.typing.cursor_moved()

    @on(Prompt.PasteTooLong)
    def refuse_paste(self) -> None:
        self.notice(
            f"A pasted text may have {MOST_PASTED:,} characters: save a longer one, and name its file after an @",
            warning=True,
        )

    @on(Prompt.Submitted)
    async def submit(self, event: Prompt.Submitted) -> None:
        try:
            command = split(event.text)
        except OrinError as error:
            self.prompt.keep()
            self.notice(str(error), warning=True)
            return
        if command is not None:
            self.prompt.sent(event.text)
            self.post_message(self.Commanded(*command))
        elif self.session.is_busy and self.session.queued:
            self.prompt.keep()
            self.notice("One prompt is waiting already · F2 takes it back")
        elif self.reading:
            self.prompt.keep()
            self.notice("The files of the last prompt are being read · Esc gives that up")
        else:
            index = self.editing
            self.end_editing()
            self.prompt.sent(event.text)
            if "@" in event.text:
                self.reading = reading = asyncio.ensure_future(self._read(event.text, index is not None))
                self.run_worker(self._send_with_files(reading, event.text, index))
            else:
                await self.session.send(event.text, in_place_of=index)

    async def _read(self, text: str, in_place: bool) -> tuple[tuple[Attachment, ...], str]:
        """The files that a prompt names, and a sentence on what it names and is none. Raises OrinError."""
        files = await asyncio.to_thread(
            self.typing.reader.read_all, text, self.session.room(in_place=in_place)
        )
        refuse_pictures(files, self.session.status)
        return files, await asyncio.to_thread(self.typing.reader.missing, text)

    async def _send_with_files(self, reading: Reading, text: str, index: int | None) -> None:
        """Sends a prompt when its files are read. If one of them cannot be, the box gets the prompt back."""
        try:
            files, missing = await reading
        except (OrinError, asyncio.CancelledError) as error:
            self.prompt.put(text)
            if index is not None:
                self._begin_editing(index)
            if isinstance(error, OrinError) and await self.typing.says(error.message, text):
                self.notice(f"Not sent. {error.hint}".rstrip(), warning=True)
            else:
                self.notice(str(error) or "Its files were not read", warning=True)
            return
        finally:
            self.reading = None
        self.typing.reader.remember(files)
        await self.session.send(text, in_place_of=index, files=files)
        if missing:
            self.notice(missing, seconds=10)

    def _takes(self) -> Takes:
        return Takes(self.session.status.sees, self.session.room(in_place=self.editing is not None))

    def edit(self) -> None:
        """Puts the last prompt into the box or, if it is there already, the one before it."""
        index = self.session.conversation.prompt_before(self.editing)
        if self.session.queued:
            self.session.take_back()
        elif index is None:
            self.notice(
                "There is no prompt to edit yet" if self.editing is None else "This is the first prompt"
            )
        elif self.session.is_answering:
            self.notice("Esc stops the reply; then F2 edits the prompt")
        else:
            if self.editing is None:
                self._draft = self.prompt.text
            self.prompt.put(self.session.conversation.turns[index].content)
            self._begin_editing(index)

    def _begin_editing(self, index: int) -> None:
        self.editing = index
        self.prompt.add_class("-editing")
        self._show_title()

    def leave_editing(self) -> None:
        """Puts back what the box held before."""
        self.end_editing()
        self.prompt.put(self._draft)

    def end_editing(self) -> None:
        self.editing = None
        self.prompt.remove_class("-editing")
        self._show_title()
