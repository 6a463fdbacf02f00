"""Two engines' answers to the same prompt, side by side: the texts, where they part, the figures, the ratios.

It shows one immutable `ComparisonView` and knows no engine. Set `Comparison.view`, ten times a second if need
be: text is drawn anew only where it changed.
"""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from widgets.comparison_view import Column, ComparisonView, mode, rows, times, verdict
from widgets.text import clean, one_line

STACKED_WIDTH = 64
"""Narrower panes have the columns one above the other."""
SHOWN_CHARACTERS = 6000
"""Of the end of a text: wrapping it all again with each token would cost more with each."""


class Comparison(Vertical, can_focus=True):
    """The pane. Its keys work while it has the focus; each only sends its message."""

    DEFAULT_CSS = """
    Comparison { height: 1fr; }
    Comparison > #answers { height: 1fr; }
    Comparison.-stacked > #answers { layout: vertical; }
    Comparison ComparedText { width: 1fr; height: 1fr; }
    Comparison ComparedText.-right { border-left: vkey $foreground 20%; }
    Comparison.-stacked ComparedText.-right { border-left: none; border-top: hkey $foreground 20%; }
    Comparison > #verdict { height: auto; max-height: 3; padding: 0 1; }
    Comparison > #mode { height: 1; padding: 0 1; color: $text-muted; }
    Comparison:focus ComparedText > .heading { background: $boost; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("r", "again", "Ask both again"),
        Binding("t", "mode", "In turn, or together"),
        Binding("escape", "close", "Close the comparison"),
    ]

    class Again(Message):
        """The user wants the last prompt answered by both again."""

    class ModeChanged(Message):
        """The user wants the engines to answer together, or no longer: from the next prompt on."""

        def __init__(self, together: bool) -> None:
            super().__init__()
            self.together = together

    class Closed(Message):
        """The user wants the comparison to end."""

    view: reactive[ComparisonView] = reactive(
        ComparisonView(Column("orin-chat"), Column("llama.cpp")), always_update=False
    )

    def compose(self) -> ComposeResult:
        with Horizontal(id="answers"):
            yield ComparedText(classes="-left")
            yield ComparedText(classes="-right")
        yield ComparedFigures()
        yield Static(markup=False, id="verdict")
        yield Static(markup=False, id="mode")

    def on_mount(self) -> None:
        self._show(self.view)

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width < STACKED_WIDTH, "-stacked")

    def watch_view(self, view: ComparisonView) -> None:
        if self.is_mounted:
            self._show(view)

    def _show(self, view: ComparisonView) -> None:
        with self.app.batch_update():
            left, right = self.query(ComparedText)
            left.show(view.left)
            right.show(view.right)
            self.query_one(ComparedFigures).view = view
            self.query_one("#verdict", Static).update(Content(verdict(view)))
            self.query_one("#mode", Static).update(Content(mode(view)))

    def action_again(self) -> None:
        self.post_message(self.Again())

    def action_mode(self) -> None:
        self.post_message(self.ModeChanged(not self.view.together))

    def action_close(self) -> None:
        self.post_message(self.Closed())


class ComparedText(Vertical):
    """One engine's name, state and text, whose end it follows."""

    DEFAULT_CSS = """
    ComparedText > .heading {
        height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ComparedText > VerticalScroll { padding: 0 1; scrollbar-size-vertical: 1; }
    ComparedText .problem { color: $text-warning; }
    """

    def __init__(self, *, classes: str) -> None:
        super().__init__(classes=classes)
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(markup=False, classes="heading")
        with VerticalScroll(can_focus=False):
            yield Static(markup=False, classes="text")
            yield Static(markup=False, classes="problem")

    def show(self, column: Column) -> None:
        heading = Content.assemble((one_line(column.name), "bold"))
        for part in (one_line(column.about), one_line(column.state)):
            if part:
                heading = heading.append(Content.styled(f" · {part}", "$foreground 60%"))
        shown = (heading, column.text, column.same, column.problem)
        if shown == self._shown:
            return
        self._shown = shown
        scroll = self.query_one(VerticalScroll)
        if scroll.is_vertical_scroll_end:
            scroll.scroll_end(animate=False)  # once the layout is done
        self.query_one(".heading", Static).update(heading)
        self.query_one(".text", Static).update(_marked(column.text, column.same))
        problem = self.query_one(".problem", Static)
        problem.display = bool(column.problem)
        problem.update(Content(f"⚠ {one_line(column.problem)}"))


def _marked(text: str, same: int) -> Content:
    """The end of a text; what differs from the other's is underlined from the first character on."""
    start = max(0, len(text) - SHOWN_CHARACTERS)
    before, after = clean(text[start : max(start, same)]), clean(text[max(start, same) :])
    return Content.assemble("… " if start else "", before, (after, "underline $text-accent"))


class ComparedFigures(Widget):
    """Both columns' figures, with the ratio between them."""

    DEFAULT_CSS = """
    ComparedFigures { height: 6; padding: 0 1; border-top: hkey $foreground 20%; }
    """
    ALLOW_SELECT = False

    view: reactive[ComparisonView | None] = reactive(None)

    def render(self) -> Content:
        if self.view is None:
            return Content("")
        return Content("\n").join([_figure_line(self.size.width, *row) for row in rows(self.view)])


def _figure_line(width: int, left: str, label: str, ratio: float | None, right: str) -> Content:
    """`left  label  ◀ 2.71×  right`: the arrow points at the better one."""
    middle = f"{label} {times(ratio)}".strip()
    side = max(0, (width - len(middle)) // 2 - 1)
    style = "bold $text-success" if ratio and ratio >= 1.005 else "bold" if ratio else "$foreground 60%"
    return Content.assemble(f"{left[:side]:<{side}} ", (middle, style), f" {right[:side]:>{side}}")
