"""The conversation, of any length: only the turns near what is visible are widgets.

Old widgets cost at every layout (400 of them: 60 % of a core while a reply streams), so at most about
`MOUNTED` turns have one. Scrolling towards either end of those moves the window; what was visible stays where
it was on the screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.message import Message
from textual.widget import Widget

from widgets.turn import Turn
from widgets.turn_view import TurnView

MOUNTED = 50
"""Turns that have a widget when the end is in sight."""
STEP = 20
"""Turns by which the window moves."""


class Transcript(VerticalScroll, can_focus=False):
    """Shows turns, follows the last one while it grows, and lets go when the user scrolls up."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 1 1 0 1; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """

    class WindowMoved(Message):
        """Older or newer turns became widgets."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []
        self._first = 0  # the turns with a widget are turns[_first:_last]
        self._last = 0
        self._unfolded = False
        self._moving = False
        self._hold: tuple[Widget, int] | None = None  # a view, and the line of the screen where it stays

    # --- what is shown ----------------------------------------------------------------------------------

    async def show(self, turns: Sequence[Turn]) -> None:
        """Replaces everything by `turns` and goes to the end."""
        self.turns = list(turns)
        with self.app.batch_update():
            await self.remove_children()
            self._first = self._last = max(0, len(self.turns) - MOUNTED)
            await self._mount_until(len(self.turns))
        self.anchor()  # for the sake of `_anchor_released`; `arrange` decides the rest

    async def add(self, turn: Turn) -> None:
        """Adds `turn` at the end; it is visible if the end is."""
        self.turns.append(turn)
        if self._last < len(self.turns) - 1:
            return  # the user reads far above; it gets a widget when they come back
        await self._mount_until(len(self.turns))
        if self._last - self._first > MOUNTED + STEP and not self._anchor_released:
            await self._unmount_before(self._last - MOUNTED)

    async def cut(self, index: int) -> None:
        """Removes the turns from `index` on."""
        views = self._views[max(0, index - self._first) :]
        del self.turns[index:]
        self._last = min(self._last, index)
        await self.remove_children(views)
        if self._first >= self._last and not self._moving:
            await self.show(self.turns)

    async def sync(self, turn: Turn) -> None:
        """Shows what `turn` has gained, if it has a widget."""
        for view in reversed(self._views):
            if view.turn is turn:
                await view.sync()
                return

    async def to_end(self) -> None:
        """Scrolls to the end and follows it from there."""
        if self._last < len(self.turns):
            await self.show(self.turns)
        else:
            self.anchor()

    async def to_start(self) -> None:
        """Scrolls to the first turn of all."""
        with self.app.batch_update():
            await self.remove_children()
            self._first = self._last = 0
            self.release_anchor()
            await self._mount_until(min(MOUNTED, len(self.turns)))
        self.scroll_home(animate=False)

    @property
    def unfolded(self) -> bool:
        """Whether thinking is shown in full."""
        return self._unfolded

    @unfolded.setter
    def unfolded(self, unfolded: bool) -> None:
        self._unfolded = unfolded
        for view in self._views:
            view.set_unfolded(unfolded)

    @property
    def follows_end(self) -> bool:
        return self.is_anchored and not self._anchor_released

    # --- the window -------------------------------------------------------------------------------------

    @property
    def _views(self) -> list[TurnView]:
        return [child for child in self.children if isinstance(child, TurnView)]

    async def _mount_until(self, last: int) -> None:
        views = [TurnView(turn, self._unfolded) for turn in self.turns[self._last : last]]
        self._last = last
        await self.mount_all(views)

    async def _mount_from(self, first: int) -> None:
        views = [TurnView(turn, self._unfolded) for turn in self.turns[first : self._first]]
        self._first = first
        await self.mount_all(views, before=0)

    async def _unmount_before(self, first: int) -> None:
        await self.remove_children(self._views[: first - self._first])
        self._first = first

    async def _unmount_after(self, last: int) -> None:
        await self.remove_children(self._views[last - self._first :])
        self._last = last

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._moving or not self.is_attached:
            return
        near = self.size.height  # one screen ahead of what is visible
        if new_value < old_value and new_value < near and self._first > 0:
            self._moving = True
            self.call_later(self._move_up)
        elif new_value > old_value and new_value > self.max_scroll_y - near and self._last < len(self.turns):
            self._moving = True
            self.call_later(self._move_down)

    async def _move_up(self) -> None:
        self._hold_visible()
        with self.app.batch_update():
            await self._mount_from(max(0, self._first - STEP))
            if self._last - self._first > MOUNTED + STEP:
                await self._unmount_after(self._first + MOUNTED + STEP)
        self.call_after_refresh(self._moved)

    async def _move_down(self) -> None:
        self._hold_visible()
        with self.app.batch_update():
            await self._mount_until(min(len(self.turns), self._last + STEP))
            if self._last - self._first > MOUNTED + STEP:
                await self._unmount_before(self._last - MOUNTED - STEP)
        self.call_after_refresh(self._moved)

    def _moved(self) -> None:
        self._moving = False
        self._hold = None
        self.scroll_to(y=self.scroll_y, animate=False, immediate=True)  # tells the scrollbar
        self.post_message(self.WindowMoved())

    def _hold_visible(self) -> None:
        """Makes the next layout keep what is visible where it is on the screen."""
        top = round(self.scroll_y)
        for view in self._views:
            if view.virtual_region.bottom > top:
                self._hold = (view, view.virtual_region.y - top)
                return

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Textual's own, with two wishes of ours before anything is painted: a conversation that fits begins
        at the top, one that does not follows its end unless the user let go; and `_hold` is held."""
        result = super().arrange(size, optimal)
        fits = result.total_region.bottom <= size.height
        self._anchored = self._last == len(self.turns) and not fits
        if fits:
            self._anchor_released = False
        if self._hold is not None:
            held, line = self._hold
            for placement in result.placements:
                if placement.widget is held:
                    self.set_reactive(Widget.scroll_y, placement.region.y - line)
                    self.set_reactive(Widget.scroll_target_y, placement.region.y - line)
        return result
