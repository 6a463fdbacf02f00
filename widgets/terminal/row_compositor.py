"""Draws rows of the screen, and only those that are asked for.

Textual's compositor draws what has changed twice over: it makes lines of every widget that is visible, of all its rows,
whichever of them are shown; and `PacedOutput`, which keeps what the terminal shows by whole rows, would draw them once
more. So an application that writes rows gets only the numbers of those that may have changed, and asks for them when
the terminal is ready.
"""

from collections.abc import Collection, Iterable, Iterator

import textual.screen
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from textual._compositor import Compositor, CompositorUpdate
from textual._context import active_app, visible_screen_stack
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip


class ChangedRows(CompositorUpdate):
    """The rows of the screen that may have changed, from the top."""

    def __init__(self, rows: Collection[int]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from ()

    def render_segments(self, console: Console) -> str:
        return ""  # an application that writes rows asks for them


class RowCompositor(Compositor):
    def rows(self, wanted: Collection[int], below: Collection[Screen[object]] = ()) -> dict[int, Strip]:
        """The wanted rows, as far as they are on the screen. `below` are the pages that are seen through this one, the
        top one last. A page takes them from what is set here when it is drawn, which may be long after `render_update`:
        without them, all beside the frame of a page was blank."""
        visible_screen_stack.set(list(below))
        drawn: dict[int, Strip] = {}
        for band in _bands(y for y in wanted if y < self.size.height):
            region = Region(0, band.start, self.size.width, len(band))
            chops = self._render_chops(region, band.__contains__)
            drawn |= {y: Strip.join(chops[y].values()) for y in band if y < len(chops)}
        return drawn

    def render_update(
        self, full: bool = False, screen_stack: list[Screen[object]] | None = None, simplify: bool = False
    ) -> RenderableType | None:
        if full or simplify or not getattr(active_app.get(), "writes_rows", False):
            return super().render_update(full, screen_stack, simplify)
        screen, dirty = self.size.region, self._dirty_regions
        rows = {y for region in dirty for y in region.intersection(screen).line_range}
        dirty.clear()
        return ChangedRows(rows) if rows else None

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        """As Textual's, but a widget draws only its rows within `crop`."""
        screen = self.size.region
        rows = screen if crop is None else Region(0, crop.y, screen.width, crop.height)
        for widget, (region, clip) in self.visible_widgets.items():
            if visible := region.intersection(clip).intersection(rows):
                yield visible, visible, widget.render_lines(visible.translate(-region.offset))


def _bands(rows: Iterable[int]) -> Iterator[range]:
    """The rows as ranges of neighbours."""
    first = last = None
    for y in sorted(rows):
        if first is not None and last is not None and y != last + 1:
            yield range(first, last + 1)
            first = None
        first, last = y if first is None else first, y
    if first is not None and last is not None:
        yield range(first, last + 1)


textual.screen.Compositor = RowCompositor  # type: ignore[attr-defined]
