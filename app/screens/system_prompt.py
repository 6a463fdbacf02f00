"""The page for the system prompt, which the model gets before the conversation."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import TextArea

from app.screens.edit_page import EditPage
from app.screens.page import Frame
from widgets.ordered_input import OrderedTextArea
from widgets.text import clean

KEYS = ("Ctrl+S saves · Esc closes", "Ctrl+S saves")
NONE = "None. For example: Answer briefly."


class SystemScreen(EditPage):
    """Dismissed with the new system prompt ("": none), or None."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = clean(text)

    def compose(self) -> ComposeResult:
        with Frame("System prompt", *KEYS):
            yield OrderedTextArea(
                self._text, soft_wrap=True, show_line_numbers=False, placeholder=Content(NONE)
            )
            yield self.problem_line

    def on_mount(self) -> None:
        editor = self.query_one(TextArea)
        editor.move_cursor(editor.document.end)

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text.strip())
