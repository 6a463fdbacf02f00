"""A list of entries of two rows each, of which one is highlighted. Only entries in sight are drawn, so that a list of
any length opens at once."""

from collections.abc import Callable
from dataclasses import dataclass

from textual.content import Content
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

_ROWS = 2  # of an entry


class EntryList(ScrollView, can_focus=False):
    COMPONENT_CLASSES = {"highlighted", "nothing"}
    DEFAULT_CSS = """
    EntryList {
        height: 1fr; background: $background; scrollbar-size-vertical: 1; overflow-x: hidden;
        text-wrap: nowrap; text-overflow: ellipsis;
        & > .highlighted { color: $foreground; background: $block-cursor-blurred-background; }
        & > .nothing { color: $text-disabled; }
    }
    """
    ALLOW_SELECT = False

    highlighted: reactive[int | None] = reactive(None)

    @dataclass
    class Highlighted(Message):
        """Another entry is highlighted."""

    @dataclass
    class Chosen(Message):
        """The user clicked on the entry at `index`."""

        index: int

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._line: Callable[[int], Content] = lambda _: Content("")
        self._nothing = ""

    def show(self, count: int, line: Callable[[int], Content], nothing: str = "") -> None:
        """Shows `count` entries; `line` makes the two rows of one of them. `nothing` is shown if there are none."""
        self.count, self._line, self._nothing = count, line, nothing
        self.highlighted = None
        self._update_size()
        self.refresh()

    @property
    def texts(self) -> list[str]:
        """All that the list says: its entries, or that there are none."""
        return [str(self._line(index)) for index in range(self.count)] or [self._nothing]

    def validate_highlighted(self, index: int | None) -> int | None:
        return None if index is None or not self.count else max(0, min(index, self.count - 1))

    def watch_highlighted(self, index: int | None) -> None:
        if index is not None:
            self._scroll_to_highlighted()
            self.post_message(self.Highlighted())
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        self._update_size()
        self._scroll_to_highlighted()

    def on_click(self, event: Click) -> None:
        index = (event.y + self.scroll_offset.y) // _ROWS
        if index < self.count:
            self.highlighted = index
            self.post_message(self.Chosen(index))

    def _update_size(self) -> None:
        self.virtual_size = Size(self.size.width, _ROWS * self.count)

    def _scroll_to_highlighted(self) -> None:
        if self.highlighted is not None and self.size:
            entry = Region(0, _ROWS * self.highlighted, self.size.width, _ROWS)
            self.scroll_to_region(entry, animate=False, force=True, immediate=True)

    def render_line(self, y: int) -> Strip:
        index, row = divmod(self.scroll_offset.y + y, _ROWS)
        width, base = self.scrollable_content_region.width, self.visual_style
        if index < self.count:
            lines = self._line(index).split("\n")
            if index == self.highlighted:
                base = self.get_visual_style("highlighted")
            content = lines[row] if row < len(lines) else Content("")
        else:
            is_first = self.count == 0 == index + row
            content = Content(self._nothing if is_first else "")
            base = self.get_visual_style("nothing")
        strips = Visual.to_strips(self, content, width, 1, base, apply_selection=False)
        return Strip.join(strips).adjust_cell_length(width, base.rich_style)
