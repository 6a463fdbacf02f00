"""The page for the system prompt, which the model gets before the conversation, and for how much the model thinks."""

from typing import NamedTuple, get_args

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Select, TextArea

from app.screens.pages.edit_page import EditPage
from engine.protocol.events import Effort
from widgets.page import Frame
from widgets.terminal.ordered_input import OrderedTextArea

KEYS = ("Ctrl+S saves · Esc closes", "Ctrl+S saves")
KEYS_WITH_EFFORT = ("Ctrl+S saves · Esc closes · Tab to the effort", *KEYS)
NONE = "None. For example: Answer briefly."
UNSET = "Effort: default"


class Instructions(NamedTuple):
    """`system` "": none. `effort` None: as the chat template has it."""

    system: str
    effort: Effort | None


class SystemScreen(EditPage[Instructions]):
    """Dismissed with the new instructions, or None. `takes_effort`: whether the model's chat template reads an effort;
    the page shows it only then."""

    DEFAULT_CSS = """
    SystemScreen Select { height: 1; width: 32; max-width: 100%; margin-bottom: 1; }
    SystemScreen.-low Select { margin: 0; }
    """

    def __init__(self, now: Instructions, *, takes_effort: bool) -> None:
        super().__init__()
        self._now = now
        efforts = [(f"Effort: {effort}", effort) for effort in get_args(Effort)]
        self._effort = Select[Effort](
            efforts, prompt=UNSET, value=now.effort or Select.NULL, type_to_search=False, compact=True
        )
        self._effort.display = takes_effort

    def compose(self) -> ComposeResult:
        with Frame("System prompt", *(KEYS_WITH_EFFORT if self._effort.display else KEYS)):
            yield OrderedTextArea(
                self._now.system, soft_wrap=True, show_line_numbers=False, placeholder=Content(NONE)
            )
            yield self._effort
            yield self.problem_line

    def on_mount(self) -> None:
        editor = self.query_one(TextArea)
        editor.move_cursor(editor.document.end)

    @property
    def edited(self) -> tuple[str, ...]:
        return *super().edited, self._effort.selection or ""

    def action_save(self) -> None:
        self.dismiss(Instructions(self.query_one(TextArea).text.strip(), self._effort.selection))
