"""What the pages have in common on which a text is edited: Ctrl+S saves it, Esc leaves it, and nothing typed is
lost by one key."""

from __future__ import annotations

from textual.binding import Binding
from textual.content import Content
from textual.widgets import Static, TextArea

from app.screens.page import Page
from widgets.text import one_line


class EditPage(Page[str | None]):
    """Composes a `Frame` with an `OrderedTextArea` and a `problem_line`. Dismissed with None when it is left. A key
    that would lose edits must be pressed twice."""

    DEFAULT_CSS = """
    EditPage TextArea, EditPage TextArea:focus {
        height: 1fr; border: none; margin: 1 0; padding: 0; scrollbar-size-vertical: 1;
    }
    EditPage.-low TextArea, EditPage.-low TextArea:focus { margin: 0; }
    EditPage #problem { height: auto; max-height: 4; color: $text-warning; }
    """
    VERTICAL_BREAKPOINTS = [(0, "-low"), (14, "-high")]  # noqa: RUF012 (declared so by Textual)
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("escape", "leave", "Close"),
        Binding("ctrl+s", "save", "Save"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.problem_line = Static(id="problem", markup=False)
        self._asked: tuple[str, ...] = ()  # what would be lost, with what was edited then

    def on_mount(self) -> None:
        self.query_one(TextArea).focus()
        self._before = self.edited

    @property
    def edited(self) -> tuple[str, ...]:
        """What can be edited here, as it is now."""
        return (self.query_one(TextArea).text,)

    def action_save(self) -> None:
        raise NotImplementedError

    def action_leave(self) -> None:
        if self.may_be_lost("Esc"):
            self.dismiss(None)

    def may_be_lost(self, key: str) -> bool:
        """Whether nothing is edited, or `key` was pressed before: else it is asked for once more."""
        is_edited = self.edited != self._before
        return not is_edited or self.is_sure(key, f"This is not saved. {key} again leaves it, Ctrl+S saves.")

    def is_sure(self, what: str, question: str) -> bool:
        """Whether `what` was asked for before, with nothing changed since."""
        asked = what, *self.edited
        if self._asked == asked:
            return True
        self._asked = asked
        self.say(question)
        return False

    def say(self, text: str) -> None:
        self.problem_line.update(Content(one_line(text)))
