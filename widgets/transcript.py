"""The conversation, of any length: only the turns near what is visible are widgets.

Old widgets cost at every layout (400 of them: 60 % of a core while a reply streams), so at most about
`MOUNTED` turns have one. Scrolling towards either end of those moves the window; what was visible stays where
it was on the screen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.widget import Widget

from widgets.auto_scroll import AutoScroll
from widgets.turn import Turn
from widgets.turn_widget import TurnWidget

MOUNTED = 50
"""Turns that have a widget when the end is in sight."""
STEP = 20
"""Turns by which the window moves."""


class Transcript(AutoScroll):
    """Shows turns, follows the last one while it grows, and lets go when the user scrolls up."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 1 1 0 1; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []
        self._first = 0  # the turns with a widget are turns[_first:_last]
        self._last = 0
        self.has_end = True  # whether the last turn has, or is about to have, a widget
        self._unfolded = False
        self._window = asyncio.Lock()  # who mounts and unmounts
        self._moving = False
        self._hold: tuple[Widget, int] | None = None  # a view, and the line of the screen where it stays

    # --- what is shown ----------------------------------------------------------------------------------

    async def show(self, turns: Sequence[Turn]) -> None:
        """Replaces everything by `turns` and goes to the end."""
        self.turns = list(turns)
        self.has_end = True
        async with self._window:
            await self._mount(len(self.turns) - MOUNTED, len(self.turns))
        self.anchor()  # for the sake of `_anchor_released`; `arrange` decides the rest

    async def add(self, turn: Turn) -> None:
        """Adds `turn` at the end; it is visible if the end is."""
        self.turns.append(turn)
        async with self._window:
            if self.has_end:  # else the user reads far above, and it gets a widget when they come back
                last = len(self.turns)
                prune = last - self._first > MOUNTED + STEP and not self._anchor_released
                await self._mount(last - MOUNTED if prune else self._first, last)

    async def cut(self, index: int) -> None:
        """Removes the turns from `index` on."""
        del self.turns[index:]
        async with self._window:
            end = len(self.turns)
            first = self._first if self._first < index else end - MOUNTED
            await self._mount(first, min(self._last, end) if first == self._first else end)

    async def sync(self, turn: Turn) -> None:
        """Shows what `turn` has gained, if it has a widget."""
        for view in reversed(self._views):
            if view.turn is turn:
                await view.sync()
                return

    async def to_end(self) -> None:
        """Scrolls to the end and follows it from there."""
        if self.has_end:
            self.anchor()
        else:
            await self.show(self.turns)

    async def to_start(self) -> None:
        """Scrolls to the first turn of all."""
        self.release_anchor()
        async with self._window:
            await self._mount(0, min(MOUNTED, len(self.turns)))
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

    # --- the window -------------------------------------------------------------------------------------

    @property
    def _views(self) -> list[TurnWidget]:
        return [child for child in self.children if isinstance(child, TurnWidget)]

    async def _mount(self, first: int, last: int) -> None:
        """Makes turns[first:last] the ones with a widget. Call with `_window` held."""
        first = max(0, first)
        self._first, self._last, self.has_end = first, last, last == len(self.turns)
        wanted = self.turns[first:last]
        kept = [view for view in self._views if view.turn in wanted]
        with self.app.batch_update():
            await self.remove_children([view for view in self._views if view not in kept])
            start = wanted.index(kept[0].turn) if kept else 0
            end = wanted.index(kept[-1].turn) + 1 if kept else 0
            for new, place in ((wanted[:start], 0), (wanted[end:], None)):
                if new:
                    await self.mount_all([TurnWidget(turn, self._unfolded) for turn in new], before=place)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        near = self.size.height  # one screen ahead of what is visible
        up = new_value < old_value and new_value < near and self._first > 0
        down = new_value > old_value and new_value > self.max_scroll_y - near and not self.has_end
        if (up or down) and not self._moving:
            self._moving = True
            self.call_later(self._move, -STEP if up else STEP)

    async def _move(self, step: int) -> None:
        """Moves the window, and what is visible not at all."""
        async with self._window:
            self._hold = self._top_view()
            if step < 0:
                first = max(0, self._first + step)
                await self._mount(first, min(self._last, first + MOUNTED + STEP))
            else:
                last = min(len(self.turns), self._last + step)
                await self._mount(max(self._first, last - MOUNTED - STEP), last)
        self.call_after_refresh(self._moved)

    def _moved(self) -> None:
        self._moving = False
        self._hold = None
        self.scroll_to(y=self.scroll_y, animate=False, immediate=True)  # tells the scrollbar

    def _top_view(self) -> tuple[Widget, int] | None:
        """The first view that is visible, and on which line of the screen it begins."""
        top = round(self.scroll_y)
        visible = (view for view in self._views if view.virtual_region.bottom > top)
        return next(((view, view.virtual_region.y - top) for view in visible), None)

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """As ever, but before anything is painted `_hold` is held."""
        result = super().arrange(size, optimal)
        if self._hold is not None:
            held, line = self._hold
            for placement in result.placements:
                if placement.widget is held:
                    self.set_reactive(Widget.scroll_y, placement.region.y - line)
                    self.set_reactive(Widget.scroll_target_y, placement.region.y - line)
        return result
