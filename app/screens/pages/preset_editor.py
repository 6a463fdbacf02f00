"""The page on which a preset is edited as text."""

from textual.app import ComposeResult
from textual.widgets import Input, TextArea

from app.screens.pages.edit_page import EditPage
from engine.errors import UsageError
from presets.loader import preset_files, save
from widgets.page import Frame
from widgets.terminal.ordered_input import OrderedInput, OrderedTextArea

KEYS = ("Ctrl+S saves · Esc closes · Tab to the name", "Ctrl+S saves · Esc closes", "Ctrl+S saves")


class PresetEditor(EditPage[str]):
    """Dismissed with the name that the preset is saved under, or None. Only a valid preset is saved. Replacing another
    preset of the user's takes a second Ctrl+S."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.preset_name, self.preset_text = name, text

    def compose(self) -> ComposeResult:
        with Frame("Preset", *KEYS):
            yield OrderedInput(self.preset_name, placeholder="name")
            yield OrderedTextArea(self.preset_text, soft_wrap=False, show_line_numbers=False)
            yield self.problem_line

    @property
    def edited(self) -> tuple[str, str]:
        return self.query_one(Input).value.strip(), self.query_one(TextArea).text

    def action_save(self) -> None:
        name, text = self.edited
        existing = preset_files().get(name)
        replaces_another = existing is not None and not existing.built_in and name != self.preset_name
        question = f"There is a preset {name} of your own. Ctrl+S again replaces it."
        if replaces_another and not self.is_sure(f"replace {name}", question):
            return
        try:
            save(name, text)
        except UsageError as error:
            self.say(str(error))
        else:
            self.dismiss(name)
