"""The pane of a comparison: two engines' answers side by side, their first difference, the figures, the ratios."""

import re

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from widgets.dashboard.comparison_data import (
    ComparisonData,
    EngineAnswer,
    FigureRow,
    conditions,
    figure_rows,
    ratio_text,
    text_comparison,
)  # fmt: skip
from widgets.text import clean, one_line

STACKED_WIDTH, STACKED_HEIGHT = 64, 22
"""A pane that is narrower, and at least this high, shows one answer above the other."""
LOW_HEIGHT, LOWEST_HEIGHT = 15, 9
"""A lower pane shows two figures, and the lowest only the decode speed, to leave room for the texts."""
MAX_CHARACTERS = 6000
"""Only the end of a text is shown, because all of it is wrapped again with each token."""
KEYS, TAB_HINT = "r asks both again · t together or in turn · Esc leaves", "Tab: keys of this pane"


class ComparisonPane(Vertical, can_focus=True):
    """Set `data` as often as it changes; a text is drawn again only if it has changed. The keys work while the pane
    has the focus, and only post messages."""

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
    ComparisonPane > #difference { height: auto; max-height: 3; padding: 0 1; }
    ComparisonPane > #conditions {
        height: 1; padding: 0 1; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ComparisonPane > #asked.-absent, ComparisonPane.-low > #asked, ComparisonPane.-low > #conditions { display: none; }
    ComparisonPane.-low > #difference { max-height: 1; }
    ComparisonPane.-low > FigureTable { height: 2; border-top: none; }
    ComparisonPane.-lowest > FigureTable { height: 1; }
    ComparisonPane.-lowest > #difference { display: none; }
    ComparisonPane:focus AnswerText > .heading { background: $primary 25%; }
    """
    FOCUS_ON_CLICK = False  # a click must not take the keys from the prompt
    BINDINGS = [
        Binding("r", "post('Again')", "Ask both again"),
        Binding("t", "post('ModeChanged')", "In turn, or together"),
        Binding("escape", "post('Closed')", "Close the comparison"),
    ]

    class Again(Message):
        """The user wants both engines to answer the last prompt again."""

    class ModeChanged(Message):
        """The user switches between answers at the same time and in turn."""

    class Closed(Message):
        """The user wants the comparison to end."""

    data: reactive[ComparisonData] = reactive(
        ComparisonData(EngineAnswer("orin-chat"), EngineAnswer("llama.cpp"))
    )

    def compose(self) -> ComposeResult:
        yield Static(markup=False, id="asked")
        with Horizontal(id="answers"):
            yield AnswerText(classes="-left")
            yield AnswerText(classes="-right")
        yield FigureTable()
        yield Static(markup=False, id="difference")
        yield Static(markup=False, id="conditions")

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

    def _show(self, data: ComparisonData) -> None:
        with self.app.batch_update():
            asked = self.query_one("#asked", Static)
            asked.set_class(not data.asked, "-absent")
            asked.update(Content(one_line(data.asked)))
            left, right = self.query(AnswerText)
            left.show(data.left)
            right.show(data.right)
            self.query_one(FigureTable).data = data
            self.query_one("#difference", Static).update(Content(text_comparison(data)))
            self._show_conditions()

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        if self.is_mounted:
            self._show_conditions()

    def _show_conditions(self) -> None:
        keys = KEYS if self.has_focus else TAB_HINT
        self.query_one("#conditions", Static).update(Content(f"{conditions(self.data)} · {keys}"))

    def scroll_pages(self, pages: int) -> None:
        """Scrolls both texts."""
        for text in self.query(AutoScroll):
            text.scroll_relative(y=pages * max(1, text.size.height - 1), animate=False)

    def action_post(self, message: str) -> None:
        self.post_message(getattr(self, message)())


class AutoScroll(VerticalScroll, can_focus=False):
    """Keeps the end of growing content in sight, unless the user has scrolled up: Textual's anchor, except that content
    which fits begins at the top."""

    follows_end = True
    """False for content that is read from its beginning."""

    def release_anchor(self) -> None:
        if self.max_scroll_y > 0:  # the mouse wheel does nothing where everything fits
            super().release_anchor()

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        result = super().arrange(size, optimal)
        self._anchored = self.follows_end and result.total_region.bottom > size.height
        return result


class AnswerText(Vertical):
    """One engine's name and state above its text, which is followed to its end."""

    DEFAULT_CSS = """
    AnswerText > .heading { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
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

    def show(self, answer: EngineAnswer) -> None:
        shown = (answer.name, answer.state, answer.about, answer.text, answer.same, answer.problem)
        if shown == self._shown:
            return
        self._shown = shown
        scroll = self.query_one(AutoScroll)
        scroll.follows_end = bool(answer.text)
        if not answer.text:  # the next answer begins
            scroll.anchor()
        about = "".join(f" · {one_line(part)}" for part in (answer.state, answer.about) if part)
        heading = Content.assemble((one_line(answer.name), "bold"), (about, "$foreground 60%"))
        self.query_one(".heading", Static).update(heading)
        self.query_one(".text", Static).update(_marked(answer.text, answer.same))
        problem = self.query_one(".problem", Static)
        problem.display = bool(answer.problem)
        problem.update(Content(f"⚠ {one_line(answer.problem)}"))


def _marked(text: str, same: int) -> Content:
    """The end of a text. The first word that differs from the other answer is underlined."""
    start = max(0, len(text) - MAX_CHARACTERS)
    word = re.compile(r"\s*\S*").match(text, same)
    begin, end = max(start, same), max(start, word.end() if word else same)
    return Content.assemble(
        "… " if start else "",
        clean(text[start:begin]),
        (clean(text[begin:end]), "bold underline $text-accent"),
        clean(text[end:]),
    )


class FigureTable(Widget):
    """The figures of both engines with the ratio between them, as many as fit."""

    DEFAULT_CSS = """
    FigureTable { height: 6; padding: 0 1; border-top: hkey $foreground 20%; }
    """
    ALLOW_SELECT = False

    data: reactive[ComparisonData | None] = reactive(None)

    def render(self) -> Content:
        if self.data is None:
            return Content("")
        width, height = self.size
        labels = ("first token", "decode")[-height:]
        rows = [row for row in figure_rows(self.data) if height > 2 or row.label in labels]
        return Content("\n").join([_figure_line(width, row) for row in rows])


_SHORT = {"first token": "first", "modelled GB/s": "GB/s"}


def _figure_line(width: int, row: FigureRow) -> Content:
    """`label          left  ◀ 2.71×  right`. Both figures are shortened alike if one does not fit, then the label."""
    left, label, ratio, right = row
    middle = 13 if width >= STACKED_WIDTH else 9
    side = max(0, (width - middle) // 2)
    if len(left) > side - len(label) - 1 or len(right) > side:
        left, right = left.partition(" (")[0], right.partition(" (")[0]
    if max(len(left), len(right)) > side:
        left, right = left.partition(" ")[0], right.partition(" ")[0]
    left = left[:side]
    if len(label) >= side - len(left):
        label = _SHORT.get(label, label)
    if len(label) >= side - len(left) and left.endswith(" tok/s"):
        left, right = left.partition(" ")[0], right.partition(" ")[0]
    if len(label) >= side - len(left):
        label = ""
    return Content.assemble(
        (f"{label:<{side - len(left)}}", "$foreground 60%"),
        left,
        (f"{ratio_text(ratio):^{middle}}", "bold $text-success" if ratio and ratio >= 1.005 else "bold"),
        right,
    )
