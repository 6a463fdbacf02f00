"""The conversation, of any length, drawn row by row.

Only the turns near what is visible are laid out; the heights of the others are estimates, which are corrected when they
come near. What is visible stays where it is on the screen meanwhile. So neither the length of the conversation nor
that of a reply costs anything while a reply streams.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.segment import Segment
from textual.events import Click, Resize, TextSelected
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from widgets.chat.turn import Turn
from widgets.chat.turn_lines import TurnLines
from widgets.late_components import LateComponents
from widgets.markdown.lines import Line
from widgets.text import clean, one_line

_GUTTER = 2
"""Cells left of the text: a bar for prompts, else blank."""
_WORD = re.compile(r"[\w@~/\\.:#%&?=+-]*[\w/~]")
_CONTEXT_ROWS = 4
"""Rows above what was searched for."""
SLOW_STRIDE = 10
"""Rows by which the view follows a reply on a slow line."""
THIN_SPELLS = 3
"""After so many of a thin line, small pictures are not shown any more."""
_TOP = 1
"""Blank rows above the first turn."""


def word_at(text: str, at: int) -> tuple[int, int]:
    """Where the word around a character begins and ends: letters and digits with what joins them in paths, addresses
    and names; the character alone if it is none of these."""
    found = next((word for word in _WORD.finditer(text) if word.start() <= at < word.end()), None)
    return found.span() if found else (at, min(at + 1, len(text)))


class Transcript(LateComponents, ScrollView, can_focus=False):
    """Shows turns, follows the last one while it grows, and lets go when the user scrolls up."""

    COMPONENT_CLASSES = {
        "em", "strong", "s", "code_inline", "heading", "heading1", "bullet", "quote", "table_header",
        "prompt", "prompt_bar",
    }  # fmt: skip
    DEFAULT_CSS = """
    Transcript {
        height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; overflow-x: hidden;
        & > .em { text-style: italic; }
        & > .strong { text-style: bold; }
        & > .s { text-style: strike; }
        &:dark > .code_inline { background: $warning 10%; color: $text-warning 95%; }
        &:light > .code_inline { background: $error 5%; color: $text-error 95%; }
        &:ansi > .code_inline { background: ansi_default; }
        & > .heading { text-style: bold; color: $text-primary; }
        & > .heading1 { text-style: bold underline; color: $text-primary; }
        & > .bullet { color: $text-primary; }
        & > .quote { color: $text-primary 50%; }
        & > .table_header { text-style: bold; color: $primary; }
        & > .prompt { background: $boost; }
        & > .prompt_bar { color: $primary; background: $boost; }
    }
    """

    @dataclass
    class LinkClicked(Message):
        """The user clicked a link in a reply; `address` is cleaned, and nothing has been done about it."""

        address: str

    def __init__(self) -> None:
        super().__init__()
        self.is_following = True  # whether the end stays in sight
        self._turns: list[TurnLines] = []
        self._tops: list[int] = []  # the first row of each turn
        self.stride = 1  # rows by which the view follows a growing end: each time, all rows are drawn
        self.unfolded = False  # whether thinking is shown in full
        self.is_tinted = False  # whether what was guessed of replies is
        self.wants_thumbnails = True  # of pictures
        self.has_thumbnails = True
        self._thin_spells = 0  # of the line
        self._is_settling = False
        self._style_version = 0
        self._wanted: tuple[int, str, int] | None = None  # what `to_turn` was asked for too early
        self._query = ""  # what is searched for, in lower case
        self._shown: list[Line | None] = []  # the lines of the visible rows

    def on_mount(self) -> None:
        self.has_thumbnails = self._may_have_thumbnails

    # --- what is shown ------------------------------------------------------------------------------------------

    @property
    def turns(self) -> list[Turn]:
        return [lines.turn for lines in self._turns]

    def show(self, turns: Sequence[Turn]) -> None:
        """Replaces everything by `turns` and goes to the end."""
        self._turns = [self._lines_of(turn, i) for i, turn in enumerate(turns)]
        self.to_end()

    def add(self, turn: Turn) -> None:
        """Adds `turn` at the end; it is visible if the end is."""
        self._turns.append(self._lines_of(turn, len(self._turns)))
        self._settle()

    def _lines_of(self, turn: Turn, index: int) -> TurnLines:
        return TurnLines(
            turn, index, unfolded=self.unfolded, has_thumbnails=self.has_thumbnails, is_tinted=self.is_tinted
        )

    def cut(self, index: int) -> None:
        """Removes the turns from `index` on."""
        del self._turns[index:]
        self._settle()

    def sync(self, turn: Turn) -> None:
        """Shows what `turn` has gained."""
        if not all(lines.is_laid_out(self.text_width) for lines in self._turns[-2:] if lines.turn is turn):
            self._settle()

    def to_end(self) -> None:
        """Scrolls to the end and follows it from there."""
        self.is_following = True
        self._settle()

    def to_start(self) -> None:
        """Scrolls to the first turn."""
        self.is_following = False
        self._scroll(0)
        self._settle()

    def to_turn(self, index: int, query: str = "", nth: int = 0) -> None:
        """Scrolls so that a turn, or the row of it with the `nth` place (from 0) of `query`, is near the top."""
        if not 0 <= index < len(self._turns):
            return
        if not self.size.height:  # it is not on the screen yet
            self._wanted = index, query, nth
            return
        self.is_following = False
        self._measure()
        self._scroll(min(self._tops[index], self._last_top))
        self._settle()
        row = self._tops[index]
        rows = [
            y
            for y, line in enumerate(self._turns[index].lines)
            if query and query in line.content.plain.lower()
        ]
        if rows:
            row += rows[min(nth, len(rows) - 1)]
        self._scroll(max(0, min(row - min(_CONTEXT_ROWS, self.size.height // 3), self._last_top)))
        self.is_following = self.scroll_y >= self.max_scroll_y
        self._settle()

    @property
    def _end(self) -> int:
        """The row at the top while the end is in sight. With a `stride`, some rows below the end may be free: at most a
        quarter."""
        stride = max(1, min(self.stride, self.size.height // 4))
        return -(-self._last_top // stride) * stride

    @property
    def _last_top(self) -> int:
        return max(0, self._n_rows - self.size.height)

    def find(self, query: str) -> list[tuple[int, int]]:
        """Marks the places of `query`, in any case. Returns the turn of each, and which it is in that turn."""
        self._query = query.lower()
        self._style_version += 1
        self.refresh()
        if not self._query:
            return []
        return [
            (index, nth)
            for index, lines in enumerate(self._turns)
            for nth in range(clean(lines.turn.content).lower().count(self._query))
        ]

    def unfold(self, unfolded: bool) -> None:
        """Shows thinking in full, or folds it."""
        self.unfolded = unfolded
        for lines in self._turns:
            lines.unfolded = unfolded
        self._settle()

    def tint(self, is_tinted: bool) -> None:
        """Tints the guessed tokens of replies, or stops to."""
        self.is_tinted = is_tinted
        for lines in self._turns:
            lines.is_tinted = is_tinted
        self._settle()

    def pace(self, *, is_slow: bool, is_thin: bool) -> None:
        """On a slow line, the view follows a reply by many rows at a time. On a thin one, pictures are shown by their
        names alone, and if it was thin THIN_SPELLS times, from then on."""
        self.stride = SLOW_STRIDE if is_slow else 1
        if is_thin and self.has_thumbnails:
            self._thin_spells += 1
        has_thumbnails = not is_thin and self._may_have_thumbnails
        if has_thumbnails != self.has_thumbnails:
            self.has_thumbnails = has_thumbnails
            for lines in self._turns:
                lines.has_thumbnails = has_thumbnails
            self._settle()

    @property
    def _may_have_thumbnails(self) -> bool:
        return self.wants_thumbnails and not self.app.no_color and self._thin_spells < THIN_SPELLS

    def action_toggle_thinking(self, index: int) -> None:
        """Shows or folds what was thought before one reply."""
        if index < len(self._turns):
            self._turns[index].unfolded = not self._turns[index].unfolded
            self._settle()

    def action_link(self, address: str) -> None:
        self.post_message(self.LinkClicked(one_line(address)))

    # --- rows ---------------------------------------------------------------------------------------------------

    @property
    def text_width(self) -> int:
        """Cells of a row of text. Space for the scrollbar is always left, though `size` includes it."""
        return max(1, self.size.width - _GUTTER - 2)

    def _settle(self) -> None:
        """Lays out the turns near the visible rows, until no height changes any more, and scrolls so that the end, or
        the row at the top, stays where it is on the screen."""
        height = self.size.height
        if not height:
            return
        self._is_settling = True
        try:
            while True:
                self._measure()
                top = self._end if self.is_following else round(self.scroll_y)
                first = self._turn_at(top - height)
                if not self._lay_out_near(first, top, height):
                    break
            self._scroll(self._end if self.is_following else round(self.scroll_y))
        finally:
            self._is_settling = False
        self._refresh_changed()

    def _refresh_changed(self) -> None:
        """Draws the rows anew that show another line than before: of a reply that grows, the last few."""
        before, top = self._shown, round(self.scroll_y)
        self._shown = [self._line(row) for row in range(top, top + self.size.height)]
        if len(before) != len(self._shown):
            self.refresh()
            return
        width = self.size.width
        rows = [y for y, (old, new) in enumerate(zip(before, self._shown, strict=True)) if old is not new]
        if rows:
            self.refresh(*(Region(0, y, width, 1) for y in rows))

    def _lay_out_near(self, first: int, top: int, height: int) -> bool:
        """Lays out turns from the one at index `first` on, down to two screens below the row `top`. Stops at the first
        whose height changes, and returns whether there was one."""
        width = self.text_width
        for tops, turn in zip(self._tops[first:], self._turns[first:], strict=False):
            if tops > top + 2 * height:
                break
            before = turn.height(width)
            turn.lay_out(width)
            if change := len(turn.lines) - before:
                if not self.is_following and tops + before <= top:
                    self._measure()
                    self._scroll(top + change)
                return True
        return False

    def _measure(self) -> None:
        """Computes where each turn begins."""
        width = self.text_width
        heights = [lines.height(width) for lines in self._turns]
        self._tops = list(accumulate(heights, initial=_TOP))

    @property
    def _n_rows(self) -> int:
        return self._tops[-1] if self._tops else _TOP

    def _turn_at(self, row: int) -> int:
        """The index of the turn that a row belongs to."""
        return max(0, min(bisect_right(self._tops, row) - 1, len(self._turns) - 1))

    def _line(self, row: int) -> Line | None:
        if not self._turns or not _TOP <= row < self._n_rows:
            return None
        index = self._turn_at(row)
        lines = self._turns[index].lines
        at = row - self._tops[index]
        return lines[at] if at < len(lines) else None

    # --- scrolling ----------------------------------------------------------------------------------------------

    def _scroll(self, y: int) -> None:
        free = max(0, y + self.size.height - self._n_rows) if self.is_following and self.stride > 1 else 0
        size = Size(self.size.width, self._n_rows + (free if self._last_top else 0))
        was, self._is_settling = self._is_settling, True
        if size != self.virtual_size:
            self.set_reactive(Transcript.virtual_size, size)  # else Textual lays the whole screen out anew
            self._scroll_update(size)
        self.scroll_target_y = self.scroll_y = y
        self._is_settling = was

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._is_settling:
            self.is_following = new_value >= self.max_scroll_y
            self._settle()

    def watch_show_vertical_scrollbar(self, is_shown: bool) -> None:
        if is_shown:  # Textual tells the scrollbar of a scroll only while it is shown
            self.vertical_scrollbar.position = round(self.scroll_y)

    def on_resize(self, event: Resize) -> None:
        self._settle()
        if self._wanted and self.size.height:
            wanted, self._wanted = self._wanted, None
            self.to_turn(*wanted)

    # --- drawing ------------------------------------------------------------------------------------------------

    def notify_style_update(self) -> None:
        self._style_version += 1
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        row, width = round(self.scroll_y) + y, self.size.width
        line = self._line(row)
        if line is None or width <= _GUTTER:
            return Strip.blank(width, self.visual_style.rich_style)
        key = width, self._style_version
        selected = None if self.text_selection is None else self.text_selection.get_span(row)
        if selected is None and line.strip is not None and line.strip[0] == key:
            strip = line.strip[1]
        else:
            strip = self._drawn(line, width, selected)
            if selected is None:
                line.strip = key, strip
        gutter, text = strip.divide([_GUTTER, width])
        return Strip.join([gutter, text.apply_offsets(0, row)])

    def _drawn(self, line: Line, width: int, selected: tuple[int, int] | None) -> Strip:
        base, content = self.visual_style, line.content
        if line.is_prompt:
            bar = (base + self._get_style(".prompt_bar")).rich_style
            base += self._get_style(".prompt")
            gutter = [Segment("▌", bar), Segment(" ", base.rich_style)]
        else:
            gutter = [Segment(" " * _GUTTER, base.rich_style)]
        if self._query:
            text = content.plain.lower()
            places = (at.start() for at in re.finditer(re.escape(self._query), text))
            for at in places:
                content = content.stylize("$text on $warning 50%", at, at + len(self._query))
        if selected is not None:
            start, end = selected
            style = self.screen.get_visual_style("screen--selection")
            content = content.stylize(style, start, None if end == -1 else end)
        texts = [
            Segment(text, (base + style).rich_style)
            for text, style in content.render(base, end="", parse_style=self._get_style)
        ]
        return Strip([*gutter, *texts]).adjust_cell_length(width, base.rich_style)

    # --- selecting ----------------------------------------------------------------------------------------------

    async def _on_click(self, event: Click) -> None:
        """A double click selects a word, a triple click a line with all rows that it is wrapped into. Textual would
        select all that the widget shows."""
        widget, offset = self.screen.get_widget_and_offset_at(event.screen_x, event.screen_y)

        if event.chain < 2 or widget is not self or offset is None:
            return
        event.prevent_default()
        row = offset.y
        if (line := self._line(row)) is None:
            return
        if event.chain == 2:
            start, end = word_at(line.content.plain, offset.x)
            selection = Selection(Offset(start, row), Offset(end, row))
        else:
            first = last = row
            while (before := self._line(first - 1)) is not None and before.end != "\n":
                first -= 1
            while (here := self._line(last)) is not None and here.end != "\n":
                last += 1
            end_of_last = self._line(last)
            assert end_of_last is not None
            selection = Selection(Offset(0, first), Offset(len(end_of_last.content.plain), last))
        self.screen.selections = {self: selection}
        self.screen.post_message(TextSelected())

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it was written: without decorations, and with wrapped rows joined."""
        first = selection.start.y if selection.start is not None else 0
        last = selection.end.y if selection.end is not None else self._n_rows - 1
        parts: list[str] = []
        for row in range(max(_TOP, first), min(last, self._n_rows - 1) + 1):
            if (line := self._line(row)) is not None and (span := selection.get_span(row)) is not None:
                start, end = span
                text = line.content.plain[max(start, line.decoration) : None if end == -1 else end]
                parts += [text.rstrip() if line.end == "\n" else text, line.end]
        return "".join(parts[:-1]), "\n"
