"""The base of the dashboard's panes, which draw lines of styled text from immutable data."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual.events import MouseMove
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from widgets.labels import label_at
from widgets.late_components import LateComponents

Data = TypeVar("Data")
Line = list[tuple[str, str]]
"""Pieces of text, each with "" or the name of a style: a key of `Pane.styles_by_name`.
The text is printable, and each character is one cell wide."""


class Pane(LateComponents, Widget, Generic[Data]):
    """Shows the lines that `draw` makes of `data`. They are made again only if the data, the size or the theme has
    changed, since several panes are on the screen while tokens arrive."""

    COMPONENT_CLASSES = {
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
    LABELS: Mapping[str, str] = {}  # what the tooltip says of each label
    ALLOW_SELECT = False
    FOCUS_ON_CLICK = False  # a click must not take the keys from the prompt

    data: reactive[Data | None] = reactive(None)
    _drawn: tuple[Data | None, Size, str] | None = None  # what `_strips` shows
    _strips: tuple[Strip, ...] = ()
    _styles: dict[str, Style] | None = None

    def draw(self, data: Data, width: int, height: int) -> list[Line]:
        """The lines of `data`. Those below `height` are not shown, and longer ones are cut."""
        raise NotImplementedError

    def on_mouse_move(self, event: MouseMove) -> None:
        """The tooltip is that of the label under the mouse."""
        at = event.get_content_offset(self)
        line = self._strips[at.y].text if at is not None and at.y < len(self._strips) else ""
        help = label_at(line, at.x, self.LABELS) if at is not None else ""
        if (help or None) != self.tooltip:
            self.tooltip = help or None

    def styles_by_name(self) -> dict[str, Style]:
        """The styles that pieces of lines may have."""
        if self._styles is None:
            self._styles = {
                name.removeprefix("pane--"): self.get_component_rich_style(name)
                for name in Pane.COMPONENT_CLASSES
            }
            self._styles[""] = self.rich_style
        return self._styles

    def notify_style_update(self) -> None:
        self._styles = None
        super().notify_style_update()

    def redraw(self) -> None:
        """Makes the lines again after a change of anything that `draw` depends on, and paints those that differ."""
        before, self._drawn = self._strips, None
        self._update_strips()
        rows = [y for y, (old, new) in enumerate(zip(before, self._strips, strict=False)) if old != new]
        if len(before) != len(self._strips):
            self.refresh()
        elif rows:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in rows))

    def render_line(self, y: int) -> Strip:
        self._update_strips()
        return self._strips[y]

    def _update_strips(self) -> None:
        wanted = (self.data, self.size, self.app.theme)
        if wanted != self._drawn:
            self._drawn, self._strips = wanted, tuple(self._make_strips())

    def _make_strips(self) -> list[Strip]:
        width, height = self.size
        styles = self.styles_by_name()
        base = styles[""]
        lines = [] if self.data is None else self.draw(self.data, width, height)[:height]
        strips = [Strip([Segment(text, styles[name]) for text, name in cut(line, width)]) for line in lines]
        strips += [Strip.blank(width, base)] * (height - len(strips))
        return [strip.adjust_cell_length(width, base) for strip in strips]


class FittedPane(Pane[Data]):
    """Is as high as its data needs, where its height is `auto`."""

    def rows(self, data: Data, width: int) -> int:
        """How many rows `data` needs."""
        raise NotImplementedError

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 0 if self.data is None else self.rows(self.data, width)

    def watch_data(self, before: Data | None, after: Data | None) -> None:
        width = self.size.width
        old, new = (0 if data is None else self.rows(data, width) for data in (before, after))
        if old != new:
            self.refresh(layout=True)


def cut(line: Line, width: int) -> Line:
    """`line` in at most `width` cells, the last of which is "…" if it was longer."""
    if sum(len(text) for text, _ in line) <= width:
        return line
    pieces: Line = []
    for text, style in line:
        if len(text) >= width:
            return [*pieces, (text[: max(0, width - 1)] + "…", style)]
        pieces.append((text, style))
        width -= len(text)
    return pieces
