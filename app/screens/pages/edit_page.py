"""The base of the pages on which a text is edited. No single key loses an edit."""

from typing import Generic, TypeVar

from textual.binding import Binding
from textual.content import Content
from textual.widgets import Static, TextArea

from widgets.page import Page
from widgets.text import one_line

Edited = TypeVar("Edited")


class EditPage(Page[Edited | None], Generic[Edited]):
    """A subclass composes a `Frame` with an `OrderedTextArea` and the `problem_line`, and implements `action_save`. Esc
    dismisses the page with None. A key that would lose something must be pressed twice."""

    DEFAULT_CSS = """
    EditPage TextArea, EditPage TextArea:focus {
        height: 1fr; border: none; margin: 1 0; padding: 0; scrollbar-size-vertical: 1;
    }
    EditPage.-low TextArea, EditPage.-low TextArea:focus { margin: 0; }
    EditPage #problem { height: auto; max-height: 4; color: $text-warning; }
    """
    VERTICAL_BREAKPOINTS = [(0, "-low"), (14, "-high")]
    BINDINGS = [Binding("escape", "leave", "Close"), Binding("ctrl+s", "save", "Save")]

    def __init__(self) -> None:
        super().__init__()
        self.problem_line = Static(id="problem", markup=False)
        self._asked: tuple[str, ...] = ()  # the last question, and the edits at that time

    def on_mount(self) -> None:
        self.query_one(TextArea).focus()
        self._unedited = self.edited

    @property
    def edited(self) -> tuple[str, ...]:
        """The texts that can be edited."""
        return (self.query_one(TextArea).text,)

    def action_save(self) -> None:
        raise NotImplementedError

    def action_leave(self) -> None:
        if self.may_be_lost("Esc"):
            self.dismiss(None)

    def may_be_lost(self, key: str) -> bool:
        """Whether nothing was edited, or `key` is pressed for the second time. Else asks."""
        question = f"This is not saved. {key} again leaves it, Ctrl+S saves."
        return self.edited == self._unedited or self.is_sure(key, question)

    def is_sure(self, action: str, question: str) -> bool:
        """Whether the user asks for `action` again, with nothing edited since. Else asks the question."""
        asked = action, *self.edited
        if self._asked == asked:
            return True
        self._asked = asked
        self.say(question)
        return False

    def say(self, text: str) -> None:
        self.problem_line.update(Content(one_line(text)))
