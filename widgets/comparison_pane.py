"""Two engines' answers to the same prompt, side by side: the texts, where they part, the figures, the ratios.

It shows one immutable `ComparisonData` and knows no engine. Set `ComparisonPane.data`, ten times a second if need
be: text is drawn anew only where it changed.
"""

from __future__ import annotations

import re

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from widgets.auto_scroll import AutoScroll
from widgets.comparison_data import ComparisonData, EngineAnswer, mode, rows, times, verdict
from widgets.text import clean, one_line

STACKED_WIDTH, STACKED_HEIGHT = 64, 22
"""Panes that are narrower, and at least as high, have the columns one above the other."""
LOW_HEIGHT, LOWEST_HEIGHT = 15, 9
"""Lower panes show two of the figures, and the lowest the decode speed alone, to leave room for the texts."""
SHOWN_CHARACTERS = 6000
"""Of the end of a text: wrapping it all again with each token would cost more with each."""
KEYS, KEYS_BY_TAB = "r asks both again · t together or in turn · Esc leaves", "Tab: keys of this pane"


class ComparisonPane(Vertical, can_focus=True):
    """The pane. Its keys work while it has the focus; each only sends its message."""

    DEFAULT_CSS = """
    ComparisonPane { height: 1fr; }
    ComparisonPane > #asked {
        height: auto; max-height: 2; padding: 0 1; margin-bottom: 1; background: $boost;
        border-left: outer $primary; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ComparisonPane > #answers { height: 1fr; }
    ComparisonPane.-stacked > #answers { layout: vertical; }
    ComparisonPane AnswerText { width: 1fr; height: 1fr; }
    ComparisonPane AnswerText.-right { border-left: vkey $foreground 20%; }
    ComparisonPane.-stacked AnswerText.-right { border-left: none; border-top: hkey $foreground 20%; }
    ComparisonPane > #verdict { height: auto; max-height: 3; padding: 0 1; }
    ComparisonPane > #mode {
        height: 1; padding: 0 1; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ComparisonPane > #asked.-absent, ComparisonPane.-low > #asked, ComparisonPane.-low > #mode { display: none; }
    ComparisonPane.-low > #verdict { max-height: 1; }
    ComparisonPane.-low > FigureTable { height: 2; border-top: none; }
    ComparisonPane.-lowest > FigureTable { height: 1; }
    ComparisonPane.-lowest > #verdict { display: none; }
    ComparisonPane:focus AnswerText > .heading { background: $primary 25%; }
    """
    ALLOW_SELECT = True
    FOCUS_ON_CLICK = False  # what is typed next is meant for the prompt
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("r", "again", "Ask both again"),
        Binding("t", "mode", "In turn, or together"),
        Binding("escape", "close", "Close the comparison"),
    ]

    class Again(Message):
        """The user wants the last prompt answered by both again."""

    class ModeChanged(Message):
        """The user wants the engines to answer together or, if they do, in turn."""

    class Closed(Message):
        """The user wants the comparison to end."""

    data: reactive[ComparisonData] = reactive(
        ComparisonData(EngineAnswer("orin-chat"), EngineAnswer("llama.cpp")), always_update=False
    )

    def compose(self) -> ComposeResult:
        yield Static(markup=False, id="asked")
        with Horizontal(id="answers"):
            yield AnswerText(classes="-left")
            yield AnswerText(classes="-right")
        yield FigureTable()
        yield Static(markup=False, id="verdict")
        yield Static(markup=False, id="mode")

    def on_mount(self) -> None:
        self._show(self.data)

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        self.set_class(width < STACKED_WIDTH and height >= STACKED_HEIGHT, "-stacked")
        self.set_class(height < LOW_HEIGHT, "-low")
        self.set_class(height < LOWEST_HEIGHT, "-lowest")

    def watch_data(self, data: ComparisonData) -> None:
        if self.is_mounted:
            self._show(data)

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        if self.is_mounted:
            self._show_mode()

    def _show(self, data: ComparisonData) -> None:
        with self.app.batch_update():
            asked = self.query_one("#asked", Static)
            asked.set_class(not data.asked, "-absent")
            asked.update(Content(one_line(data.asked)))
            left, right = self.query(AnswerText)
            left.show(data.left)
            right.show(data.right)
            self.query_one(FigureTable).data = data
            self.query_one("#verdict", Static).update(Content(verdict(data)))
            self._show_mode()

    def _show_mode(self) -> None:
        keys = KEYS if self.has_focus else KEYS_BY_TAB
        self.query_one("#mode", Static).update(Content(f"{mode(self.data)} · {keys}"))

    def scroll_pages(self, pages: int) -> None:
        """Scrolls both texts."""
        for text in self.query(AutoScroll):
            text.scroll_relative(y=pages * max(1, text.size.height - 1), animate=False)

    def action_again(self) -> None:
        self.post_message(self.Again())

    def action_mode(self) -> None:
        self.post_message(self.ModeChanged())

    def action_close(self) -> None:
        self.post_message(self.Closed())


class AnswerText(Vertical):
    """One engine's name, state and text, whose end it follows."""

    DEFAULT_CSS = """
    AnswerText > .heading {
        height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis;
    }
    AnswerText > AutoScroll { padding: 0 1; scrollbar-size-vertical: 1; }
    AnswerText .problem { color: $text-warning; }
    """

    def __init__(self, *, classes: str) -> None:
        super().__init__(classes=classes)
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(markup=False, classes="heading")
        with AutoScroll():
            yield Static(markup=False, classes="text")
            yield Static(markup=False, classes="problem")

    def show(self, column: EngineAnswer) -> None:
        heading = Content.assemble((one_line(column.name), "bold"))
        for part in (one_line(column.state), one_line(column.about)):
            if part:
                heading = heading.append(Content.styled(f" · {part}", "$foreground 60%"))
        shown = (heading, column.text, column.same, column.problem)
        if shown == self._shown:
            return
        self._shown = shown
        scroll = self.query_one(AutoScroll)
        scroll.has_end = bool(column.text)  # what went wrong instead is read from its beginning
        if not column.text:  # another answer begins
            scroll.anchor()
        self.query_one(".heading", Static).update(heading)
        self.query_one(".text", Static).update(_marked(column.text, column.same))
        problem = self.query_one(".problem", Static)
        problem.display = bool(column.problem)
        problem.update(Content(f"⚠ {one_line(column.problem)}"))


def _marked(text: str, same: int) -> Content:
    """The end of a text; the word that is not the other's any more is underlined."""
    start = max(0, len(text) - SHOWN_CHARACTERS)
    word = re.compile(r"\s*\S*").match(text, same)
    end = max(start, word.end() if word else same)
    before, parting, after = (
        clean(text[start : max(start, same)]),
        clean(text[max(start, same) : end]),
        text[end:],
    )
    return Content.assemble(
        "… " if start else "", before, (parting, "bold underline $text-accent"), clean(after)
    )


class FigureTable(Widget):
    """Both columns' figures on either side of the ratio between them, as many as the pane leaves room for."""

    DEFAULT_CSS = """
    FigureTable { height: 6; padding: 0 1; border-top: hkey $foreground 20%; }
    """
    ALLOW_SELECT = False

    data: reactive[ComparisonData | None] = reactive(None)

    def render(self) -> Content:
        if self.data is None:
            return Content("")
        room = self.size.height
        shown = [row for row in rows(self.data) if room > 2 or row[1] in ("first token", "decode")[-room:]]
        return Content("\n").join([_figure_line(self.size.width, *row) for row in shown])


def _figure_line(width: int, left: str, label: str, ratio: float | None, right: str) -> Content:
    """`label          left  ◀ 2.71×  right`: the ratio in the middle, its arrow at the better one."""
    middle = 13 if width >= STACKED_WIDTH else 9
    side = max(0, (width - middle) // 2)
    better = "bold $text-success" if ratio and ratio >= 1.005 else "bold"
    room = side - len(label) - 1
    if len(left) > room or len(right) > side:  # what one side has no room for, neither says
        left, right = left.partition(" (")[0], right.partition(" (")[0]
    if max(len(left), len(right)) > side:
        left, right = left.partition(" ")[0], right.partition(" ")[0]
    left = left[:side]
    if len(label) >= side - len(left):
        label = ""
    return Content.assemble(
        (f"{label:<{side - len(left)}}", "$foreground 60%"),
        left,
        (f"{times(ratio):^{middle}}", better),
        right,
    )
