"""The column of the conversation: what the screen shows of a session, from the transcript to the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.widgets import Static

from app.chat.history import HistoryError
from app.chat.session import Session
from app.chat.turn import Turn
from app.comparison.engine_pair import EnginePair
from widgets.activity_line import ActivityLine, status_text
from widgets.comparison_pane import ComparisonPane
from widgets.engine_status import Phase
from widgets.prompt import Prompt
from widgets.status_line import StatusLine
from widgets.text import one_line
from widgets.transcript import Transcript
from widgets.welcome import Welcome

PLACEHOLDERS = (
    "Ask anything · Enter sends · Ctrl+J new line · F1 keys",
    "Ask anything · F1 shows the keys",
    "Ask anything",
)
EDITING = (
    "editing · Enter sends it in place of the old one and what follows · F2 the one before · Esc leaves it",
    "editing · Enter replaces it and what follows · F2 the one before · Esc",
    "editing · Enter replaces · F2 the one before · Esc",
    "editing · Esc leaves it",
)
TINY_WIDTH = 40
"""Narrower terminals show the chat and the prompt only."""
NOTICE_S = 5.0


class ChatColumn(Vertical):
    """The `View` of a session, which is given to it by `attach`. What grows is looked at in `draw`. The
    `status_line` is for the foot of the screen: whoever puts the column there puts that too."""

    DEFAULT_CSS = """
    ChatColumn { width: 1fr; }
    ChatColumn Welcome, ChatColumn ComparisonPane { display: none; }
    ChatColumn.-empty Transcript { display: none; }
    ChatColumn.-empty Welcome { display: block; }
    ChatColumn.-comparing Transcript, ChatColumn.-comparing Welcome { display: none; }
    ChatColumn.-comparing ComparisonPane { display: block; }
    ChatColumn #queued { display: none; height: 1; padding: 0 2; color: $text-accent; }
    ChatColumn #queued.-waiting { display: block; }
    ChatColumn Prompt { margin: 0 1; }
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(id="chat")
        self.clock = clock
        self.problem: HistoryError | None = None  # why the conversation is not saved
        self.editing: int | None = None  # index of the turn that the prompt box replaces
        self._set_aside = ""  # what was in the box before
        self.way_back = ""  # which keys bring the chat back, while panes have its place
        self._notice_until = 0.0
        self._title = ""
        # Made here: `query_one` looks into the screen on top, which may be another by then.
        self.welcome, self.transcript, self.comparison = Welcome(), Transcript(), ComparisonPane()
        self.activity, self.prompt = ActivityLine(), Prompt(PLACEHOLDERS[0])
        self.waiting = Static(id="queued", markup=False)
        self.status_line = StatusLine()

    def attach(self, session: Session) -> None:
        self.session = session

    def compose(self) -> ComposeResult:
        yield self.welcome
        yield self.transcript
        yield self.comparison
        yield self.activity
        yield self.waiting
        yield self.prompt

    def on_resize(self, event: Resize) -> None:
        self.prompt.placeholder = _fitting(PLACEHOLDERS, event.size.width)

    # --- what the session tells (app.session.View) ------------------------------------------------------

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
        if isinstance(engine := self.session.engine, EnginePair):
            engine.forget()
        self.transcript.show(self.session.conversation.turns)
        self.show_status()

    def queue_changed(self) -> None:
        first = f"⏎ next: {one_line(self.session.queued)}"
        shown = Content(first).truncate(max(20, self.app.size.width - 24), ellipsis=True)
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
        """Says it once; the status line keeps two words of it in sight."""
        if problem is not None and self.problem is None:
            self.notice(str(problem), warning=True, seconds=10)
        self.problem = problem
        self.status_line.warning = "not saved" if problem is not None else ""

    # --- drawing ----------------------------------------------------------------------------------------

    async def draw(self) -> None:
        """Shows what has grown since the last time."""
        if (reply := self.session.reply) is not None:
            self.transcript.sync(reply)
        if self._notice_until and self.clock() >= self._notice_until:
            self.notice("")
        self.show_status()

    def show_status(self) -> None:
        session = self.session
        status = session.status.snapshot()
        self.activity.status = self.welcome.status = self.status_line.status = status
        self.set_class(not session.conversation.turns, "-empty")
        self.set_class(isinstance(session.engine, EnginePair), "-comparing")
        if isinstance(session.engine, EnginePair):
            self.comparison.data = session.engine.view()
        is_idle = status.phase in (Phase.READY, Phase.GONE)
        stops = "Esc stops" if session.is_answering else ""
        is_at_work = status.phase in (Phase.PREFILLING, Phase.GENERATING)
        two = session.engine if is_at_work and isinstance(session.engine, EnginePair) else None
        self.activity.activity = two.doing if two else ""
        self.activity.hint = self.way_back or ("F1 keys  Ctrl+P commands" if is_idle else stops)
        if (candidate := session.candidate) is not None and not session.is_answering:
            doing = status_text(candidate.status.snapshot())
            self.notice(f"{candidate.name}: {doing} · Esc gives it up", seconds=2)
        self._show_title()

    def _show_title(self) -> None:
        """In the prompt's border: that it edits or, where there is no room elsewhere, the activity."""
        title = _fitting(EDITING, self.size.width) if self.editing is not None else ""
        if self.app.size.width < TINY_WIDTH:
            title = title or self.activity.notice or self.activity.text
        if title != self._title:
            self._title = title
            self.prompt.border_title = Content(title)

    # --- prompts ----------------------------------------------------------------------------------------

    @on(Prompt.Submitted)
    async def submit(self, event: Prompt.Submitted) -> None:
        if self.session.is_busy and self.session.queued:
            self.notice("One prompt is waiting already · F2 takes it back")
            return
        index = self.editing
        self.end_editing()
        self.prompt.sent(event.text)
        await self.session.send(event.text, in_place_of=index)

    def edit(self) -> None:
        """Brings the last prompt back into the box or, where that is there, the one before."""
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
                self._set_aside = self.prompt.text
            self.editing = index
            self.prompt.put(self.session.conversation.turns[index].content)
            self.prompt.add_class("-editing")
            self._show_title()

    def leave_editing(self) -> None:
        """What was in the box before is there again."""
        self.end_editing()
        self.prompt.put(self._set_aside)

    def end_editing(self) -> None:
        self.editing = None
        self.prompt.remove_class("-editing")
        self._show_title()


def _fitting(texts: Sequence[str], width: int) -> str:
    """The longest that a box of this width has room for; texts get shorter."""
    return next((text for text in texts if len(text) <= width - 8), texts[-1])
