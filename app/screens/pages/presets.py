"""The page of presets: the speeds measured under each, and why some do not work here; choose, edit, delete."""

from textual.binding import Binding
from textual.content import Content

from app.chat.speed_history import preset_speeds
from app.screens.engine_setup import EngineSetup
from app.screens.pages.list_page import ListPage
from app.screens.pages.preset_editor import PresetEditor
from presets.loader import PresetFile, delete, preset_files
from widgets.text import clean, one_line


class PresetsScreen(ListPage[PresetFile, str | None]):
    """Dismissed with the name of the preset to switch to, or None."""

    FRAME_TITLE = "Presets"
    KEYS = (
        "Enter chooses · Esc closes · F2 edits, as your own · Del deletes your own",
        "Enter chooses · F2 edits · Del deletes",
        "F2 edits · Del deletes",
        "F2 edits · Del",
    )
    PLACEHOLDER = "Search"
    EMPTY = NOTHING_FOUND = "No preset has these words."
    BINDINGS = [Binding("f2", "edit", "Edit", priority=True)]

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__()
        self.setup = setup

    def find(self, text: str) -> list[PresetFile]:
        self.speeds = preset_speeds(self.setup.model_path)
        words = text.lower().split()
        titles = ((f"{preset.name} {_title(preset)}".lower(), preset) for preset in preset_files().values())
        return [preset for title, preset in titles if all(word in title for word in words)]

    def line(self, preset: PresetFile) -> Content:
        """The name and the title; below, the speeds or why it does not work."""
        problem, measured = preset.problem or self.setup.problem(preset.preset), self.speeds.get(preset.name)
        owner = "" if preset.built_in else "  your own"
        speeds = f"not available: {problem}" if problem else str(measured or "") or "not measured yet"
        return Content.assemble(
            "▸ " if self.is_in_use(preset) else "  ",
            (one_line(preset.name), "$foreground 65% strike" if problem else "bold"),
            (f"  {one_line(_title(preset))}{owner}", f"$foreground {65 if problem else 80}%"),
            "\n",
            (f"    {one_line(speeds)}", "$foreground 65%"),
        )

    def key(self, preset: PresetFile) -> str:
        return preset.name

    def is_in_use(self, preset: PresetFile) -> bool:
        return preset.name == self.setup.name

    def choose(self, preset: PresetFile) -> None:
        self.dismiss(preset.name)

    def action_edit(self) -> None:
        if (preset := self.highlighted) is not None:
            try:
                text = clean(preset.path.read_text("utf-8", errors="replace"))
            except OSError:
                text = ""
            self.app.push_screen(PresetEditor(preset.name, text), self.show_entries)

    def delete(self, preset: PresetFile) -> None:
        if preset.built_in:
            self.say(f"{preset.name} comes with orin-chat; presets of your own can be deleted.")
        else:
            question = f"Delete your own {preset.name} for good? y deletes, any other key keeps it"
            self.ask(question, lambda: self.attempt(lambda: delete(preset.name)))


def _title(preset: PresetFile) -> str:
    return preset.preset.title if preset.preset else ""
