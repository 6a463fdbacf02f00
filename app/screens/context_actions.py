"""How a chat goes on when the context is full, and the page that offers it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from app.chat.failures import TOO_LONG
from app.chat.session import Session
from app.screens.chat_column import ChatColumn
from widgets.page import Frame, Page
from widgets.text import counted


class Way(NamedTuple):
    """A way to go on. `name` is the method `action_<name>` of the application."""

    name: Literal["summarize", "leave_out", "lengthen"]
    title: str
    help: str


WAYS = (
    Way(
        "summarize", "New chat with a summary", "The model sums this chat up; the new chat goes on from there"
    ),
    Way("leave_out", "Leave out the oldest turns", "The model no longer reads them; the chat keeps them"),
    Way("lengthen", "The longest context", "What model and memory allow; the engine starts again for it"),
)


class FullContextScreen(Page[str | None]):
    """Dismissed with the name of one of the `ways`, or None. `context_length` is in tokens."""

    DEFAULT_CSS = """
    FullContextScreen > Frame { width: 76; height: auto; min-height: 0; padding: 1 2; }
    FullContextScreen OptionList, FullContextScreen OptionList:focus {
        height: auto; border: none; padding: 0; margin-top: 1; background: $background;
    }
    """
    BINDINGS = [Binding("escape", "dismiss", "Close", priority=True)]

    def __init__(self, context_length: int, ways: Sequence[Way]) -> None:
        super().__init__()
        self._length, self._ways = context_length, ways

    def compose(self) -> ComposeResult:
        tokens = f" of {counted(self._length, 'token')}" if self._length else ""
        with Frame(
            "The context is full", "Up and Down choose · Enter goes on · Esc closes", "Enter · Esc closes"
        ):
            yield Static(
                f"The model reads at most a context{tokens}. This chat has no more room in it.", markup=False
            )
            options = []
            for way in self._ways:
                text = Content.assemble((way.title, "bold"), "\n", (way.help, "$foreground 65%"))
                options.append(Option(text, way.name))
            yield OptionList(*options)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


class ContextActions(App[None]):
    """A part of `ChatApp`."""

    session: Session
    column: ChatColumn

    @work(group="full", exclusive=True)
    async def offer_ways_on(self) -> None:
        """Asks how to go on in a full context, and does so."""
        status = self.session.status.snapshot()
        length = status.context_length
        is_longest = 0 < status.ready.model.trained_context <= length
        if self.session.is_too_long and is_longest:
            self.column.notice(f"{TOO_LONG}, and Ctrl+L chooses a model with a longer context", warning=True)
            return
        ways = [
            way for way in WAYS if not (is_longest if way.name == "lengthen" else self.session.is_too_long)
        ]
        if name := await self.push_screen_wait(FullContextScreen(length, ways)):
            await self.run_action(name)

    async def action_summarize(self) -> None:
        if not self.column.refuse_while_busy():
            await self.session.summarize()

    async def action_leave_out(self) -> None:
        if not self.column.refuse_while_busy():
            await self.session.leave_out()
