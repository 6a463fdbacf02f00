"""How what is being typed could go on: a short list above the prompt, of which one entry is highlighted."""

from collections.abc import Sequence
from typing import NamedTuple

from textual.content import Content
from textual.widgets import Static

from widgets.text import one_line

ROWS = 6


class Suggestion(NamedTuple):
    """`text` takes the place of what was typed. `help` says what it is. `ends`: nothing more belongs to it, so that
    Enter may send it."""

    text: str
    help: str = ""
    ends: bool = False


class Suggestions(Static):
    DEFAULT_CSS = """
    Suggestions { display: none; height: auto; padding: 0 2; text-wrap: nowrap; text-overflow: ellipsis; }
    Suggestions.-open { display: block; }
    """
    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.start = 0  # the column in the line of the cursor where what was typed begins
        self.before = ""  # the line of the cursor, up to it, when they were listed
        self._entries: Sequence[Suggestion] = ()
        self._index = 0

    @property
    def is_open(self) -> bool:
        return bool(self._entries)

    @property
    def highlighted(self) -> Suggestion | None:
        return self._entries[self._index] if self._entries else None

    def show(self, start: int, entries: Sequence[Suggestion], before: str = "") -> None:
        """Lists `entries` for the text `before` the cursor; none: closes the list."""
        self.before = before
        if entries != self._entries:
            self._index = 0
        self.start, self._entries = start, entries
        self.set_class(bool(entries), "-open")
        self._draw()

    def close(self) -> None:
        if self._entries:
            self.show(0, ())

    def move(self, step: int) -> None:
        self._index = (self._index + step) % len(self._entries)
        self._draw()

    def _draw(self) -> None:
        top = max(0, min(self._index - ROWS // 2, len(self._entries) - ROWS))
        shown = self._entries[top : top + ROWS]
        width = max((len(entry.text) for entry in shown), default=0)
        lines = []
        for row, entry in enumerate(shown, top):
            mark, style = ("▸ ", "bold $text-primary") if row == self._index else ("  ", "$foreground 80%")
            name = f"{mark}{one_line(entry.text):<{width}}"
            lines.append(Content.assemble((name, style), (f"  {one_line(entry.help)}", "$foreground 60%")))
        self.update(Content("\n").join(lines))
