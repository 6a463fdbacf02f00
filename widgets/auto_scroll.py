"""A scroll view that keeps the end of growing content in sight, unless the user has scrolled up."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult


class AutoScroll(VerticalScroll, can_focus=False):
    """Textual's anchor, except that content which fits begins at the top."""

    follows_end = True
    """False for content that is read from its beginning."""

    def release_anchor(self) -> None:
        if self.max_scroll_y > 0:  # the mouse wheel does nothing where everything fits
            super().release_anchor()

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        result = super().arrange(size, optimal)
        self._anchored = self.follows_end and result.total_region.bottom > size.height
        return result
