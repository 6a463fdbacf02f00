"""The base of the dashboard's panes: lines drawn by hand from an immutable data, only when it has changed."""

from __future__ import annotations

from typing import Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

Data = TypeVar("Data")
Line = list[tuple[str, str]]
"""Pieces of text, each with the name of a style: one of `Pane.COMPONENT_CLASSES` without "pane--", or "".
Texts are printable and of characters one cell wide."""


class Pane(Widget, Generic[Data]):
    """`draw` makes the lines of a data; what is beyond the widget's size is cut off."""

    COMPONENT_CLASSES = {  # noqa: RUF012 (declared so by Textual)
        "pane--strong", "pane--dim", "pane--value", "pane--hatched", "pane--line", "pane--warning",
        "pane--selected",
    }  # fmt: skip
    DEFAULT_CSS = """
    Pane {
        height: 1fr; padding: 0 1; border: round $foreground 20%;
        border-title-color: $text-muted; border-subtitle-color: $text-muted;
        &:focus { border: round $primary 60%; }
        & > .pane--strong { color: $text; text-style: bold; }
        & > .pane--dim { color: $text-muted; }
        & > .pane--value { color: $primary; }
        & > .pane--hatched { color: $text-secondary; }
        & > .pane--line { color: $text-accent; }
        & > .pane--warning { color: $text-warning; }
        & > .pane--selected { background: $primary 25%; text-style: bold; }
    }
    """
    ALLOW_SELECT = False
    FOCUS_ON_CLICK = False  # what is typed next is meant for the prompt

    data: reactive[Data | None] = reactive(None)

    def draw(self, data: Data, width: int, height: int) -> list[Line]:
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        lines = self._strips()
        return lines[y] if y < len(lines) else Strip.blank(self.size.width, self._base)

    def redraw(self) -> None:
        """After a change of something else that `draw` looks at."""
        self._drawn_for = None
        self.refresh()

    _drawn_for: tuple[Data | None, Size, str] | None = None
    _lines: tuple[Strip, ...] = ()
    _base = Style()

    def _strips(self) -> tuple[Strip, ...]:
        wanted = (self.data, self.size, self.app.theme)
        before = self._drawn_for
        if before is None or wanted[0] is not before[0] or wanted[1:] != before[1:]:
            self._drawn_for = wanted
            self._base = self.rich_style
            styles = {"": self._base}
            lines = [] if self.data is None else self.draw(self.data, self.size.width, self.size.height)
            self._lines = tuple(self._strip(line, styles) for line in lines[: self.size.height])
        return self._lines

    def _strip(self, line: Line, styles: dict[str, Style]) -> Strip:
        segments = []
        for text, name in cut(line, self.size.width):
            if name not in styles:
                styles[name] = self.get_component_rich_style(f"pane--{name}")
            segments.append(Segment(text, styles[name]))
        return Strip(segments).adjust_cell_length(self.size.width, self._base)


def cut(line: Line, width: int) -> Line:
    """`line` with "…" as its last character where there is more of it than fits."""
    if sum(len(text) for text, _ in line) <= width:
        return line
    room = width
    kept: Line = []
    for text, name in line:
        if len(text) >= room:
            return [*kept, (text[: max(0, room - 1)] + "…", name)]
        kept.append((text, name))
        room -= len(text)
    return kept
