"""A view of what grows: its end stays in sight until the user scrolls up, and again when they come back to it."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult


class AutoScroll(VerticalScroll, can_focus=False):
    """Textual's own anchor, with a wish of ours before anything is painted: what fits begins at the top."""

    has_end = True
    """Whether there is an end to follow in what it shows."""

    def release_anchor(self) -> None:
        if self.max_scroll_y > 0:  # where everything fits, the wheel means nothing
            super().release_anchor()

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        result = super().arrange(size, optimal)
        self._anchored = self.has_end and result.total_region.bottom > size.height
        return result
