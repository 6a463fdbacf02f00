"""The line in which the open chat is searched."""

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Input, Static

from widgets.chat.prompt import Prompt
from widgets.chat.transcript import Transcript
from widgets.terminal.ordered_input import OrderedInput


class FindBar(Horizontal):
    """Enter and Down go to the next place, Up to the one before, Esc closes."""

    DEFAULT_CSS = """
    FindBar { display: none; height: 1; padding: 0 2; }
    FindBar.-open { display: block; }
    FindBar Input, FindBar Input:focus { border: none; height: 1; padding: 0 1; width: 1fr; background: $surface; }
    FindBar Static { width: auto; padding-left: 1; color: $text-muted; }
    """
    BINDINGS = [
        Binding("escape", "close", priority=True),
        Binding("enter,down,ctrl+f", "move(1)", priority=True),
        Binding("up", "move(-1)", priority=True),
    ]

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self.field = OrderedInput(placeholder="Find in this chat", select_on_focus=True)
        self._transcript = transcript
        self._places: list[tuple[int, int]] = []
        self._index = 0
        self._count = Static(markup=False)

    def compose(self) -> ComposeResult:
        yield self.field
        yield self._count

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def open(self, query: str = "", place: tuple[int, int] | None = None) -> None:
        """Shows the line. Without a `query`, the user types one, and it goes to the last place of that; else to the
        first from `place` on: a turn and the place in that."""
        self.add_class("-open")
        with self.prevent(Input.Changed):
            self.field.value = query or self.field.value
        self._search(place)
        if not query:
            self.field.focus()

    def action_close(self) -> None:
        self.remove_class("-open")
        self._transcript.find("")
        self.screen.set_focus(self.screen.query_one(Prompt))  # at once: the next Esc is not for this line

    def action_move(self, step: int) -> None:
        if self._places:
            self._go((self._index + step) % len(self._places))

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        self._search(None)

    def _search(self, place: tuple[int, int] | None) -> None:
        self._places = self._transcript.find(self.field.value)
        self._count.update("nothing" if self.field.value else "Enter next · Up before · Esc closes")
        if self._places:
            first = next((i for i, each in enumerate(self._places) if place and each >= place), None)
            self._go(len(self._places) - 1 if first is None else first)

    def _go(self, index: int) -> None:
        self._index = index
        turn, nth = self._places[index]
        self._transcript.to_turn(turn, self.field.value.lower(), nth)
        self._count.update(f"{index + 1}/{len(self._places)} · Enter next · Up before · Esc closes")
