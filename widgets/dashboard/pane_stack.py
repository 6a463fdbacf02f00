"""Panes above one another, of which one may have all the room."""

from textual.containers import Vertical
from textual.widget import Widget


class PaneStack(Vertical):
    """`panes` are those that may. One with the class `-absent` has nothing to show."""

    DEFAULT_CSS = """
    PaneStack.-zoomed > * { display: none; }
    PaneStack.-zoomed > .-whole { display: block; height: 1fr; max-height: 100%; }
    """
    panes: tuple[Widget, ...] = ()

    @property
    def whole(self) -> Widget | None:
        """The pane that has all the room."""
        return next((pane for pane in self.panes if pane.has_class("-whole")), None)

    @property
    def next_pane(self) -> Widget | None:
        """The pane after that one, None after the last."""
        return next_pane(self.panes, self.whole)

    def zoom(self, pane: Widget | None) -> None:
        """Gives the room to `pane`; None: to all of them."""
        for other in self.panes:
            other.set_class(other is pane, "-whole")
        self.set_class(pane is not None, "-zoomed")
        if pane is not None:
            pane.focus()


def next_pane(panes: tuple[Widget, ...], whole: Widget | None) -> Widget | None:
    """The pane of `panes` after `whole`, or the first; None after the last."""
    index = 0 if whole is None else panes.index(whole) + 1
    return next((pane for pane in panes[index:] if not pane.has_class("-absent")), None)
