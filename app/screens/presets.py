"""The page of presets: the speeds measured under each, and why some do not work here; choose, edit, delete."""

from __future__ import annotations

from pathlib import Path

from textual.binding import Binding
from textual.content import Content

from app.screens.engine_setup import EngineSetup, PresetListing
from app.screens.list_page import ListPage
from app.screens.preset_editor import PresetEditor
from presets.loader import delete
from widgets.text import clean, one_line


class PresetsScreen(ListPage[PresetListing, str | None]):
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

    def find(self, text: str) -> list[PresetListing]:
        words = text.lower().split()
        titles = ((f"{preset.entry.name} {preset.title}".lower(), preset) for preset in self.setup.listings())
        return [preset for title, preset in titles if all(word in title for word in words)]

    def line(self, preset: PresetListing) -> Content:
        """The name and the title; below, the speeds or why it does not work."""
        owner = "" if preset.entry.built_in else "  your own"
        speeds = f"not available: {preset.problem}" if preset.problem else preset.speeds or "not measured yet"
        return Content.assemble(
            "▸ " if preset.is_active else "  ",
            (one_line(preset.entry.name), "$foreground 65% strike" if preset.problem else "bold"),
            (f"  {one_line(preset.title)}{owner}", f"$foreground {65 if preset.problem else 80}%"),
            "\n",
            (f"    {one_line(speeds)}", "$foreground 65%"),
        )

    def key(self, preset: PresetListing) -> str:
        return preset.entry.name

    def is_in_use(self, preset: PresetListing) -> bool:
        return preset.is_active

    def choose(self, preset: PresetListing) -> None:
        self.dismiss(preset.entry.name)

    def action_edit(self) -> None:
        if (preset := self.highlighted) is not None:
            editor = PresetEditor(preset.entry.name, _text(preset.entry.path))
            self.app.push_screen(editor, self.show_entries)

    def delete(self, preset: PresetListing) -> None:
        if preset.entry.built_in:
            self.say(f"{preset.entry.name} comes with orin-chat; presets of your own can be deleted.")
        else:
            question = f"Delete your own {preset.entry.name} for good? y deletes, any other key keeps it"
            self.ask(question, lambda: self.attempt(lambda: delete(preset.entry.name)))


def _text(path: Path) -> str:
    try:
        return clean(path.read_text("utf-8", errors="replace"))
    except OSError:
        return ""
