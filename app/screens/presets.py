"""The presets: which there are, what was measured under each, why some cannot be had; choose one, or edit one
as the text it is."""

from __future__ import annotations

from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from app.screens.edit_page import EditPage
from app.screens.engine_setup import EngineSetup, PresetListing
from app.screens.page import Frame, Page
from engine.errors import UsageError
from presets.loader import delete, entries, save
from widgets.ordered_input import OrderedInput, OrderedTextArea
from widgets.text import clean, one_line

KEYS = "Enter chooses · Esc closes · F2 edits, as your own · Del deletes your own"
EDIT_KEYS = "Ctrl+S saves · Esc closes · Tab to the name"


class PresetsScreen(Page[str | None]):
    """Dismissed with the name of the preset to go over to, or None."""

    DEFAULT_CSS = """
    PresetsScreen #question { height: auto; max-height: 3; color: $text-warning; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("escape", "dismiss", "Close"),
        Binding("f2", "edit", "Edit"),
        Binding("delete,ctrl+d", "delete", "Delete"),
    ]

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__()
        self.setup = setup
        self._deleting = ""  # which was asked about

    def compose(self) -> ComposeResult:
        with Frame("Presets", KEYS):
            yield OptionList(markup=False)
            yield Static(id="question", markup=False)

    def on_mount(self) -> None:
        self.list = self.query_one(OptionList)
        self.list.focus()
        self._fill()

    def _fill(self, chosen: str | None = None) -> None:
        listings = self.setup.listings()
        self.list.clear_options()
        for offer in listings:
            self.list.add_option(Option(_line(offer), id=offer.name, disabled=False))
        self.list.highlighted = next(
            (i for i, o in enumerate(listings) if (o.name == chosen if chosen else o.is_active)), 0
        )

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)

    @on(OptionList.OptionHighlighted)
    def _forget_question(self) -> None:
        self._ask("")

    @property
    def _offer(self) -> PresetListing | None:
        option = self.list.highlighted_option
        return next((offer for offer in self.setup.listings() if option and offer.name == option.id), None)

    def action_edit(self) -> None:
        if offer := self._offer:
            edit = EditScreen(offer.name, _text(offer.path))
            self.app.push_screen(edit, lambda saved: self._fill(saved or offer.name))

    def action_delete(self) -> None:
        if (offer := self._offer) is None:
            return
        if offer.built_in:
            self._ask(f"{offer.name} comes with orin-chat; presets of your own can be deleted.")
        elif self._deleting != offer.name:
            self._ask(f"Delete again removes your own {offer.name} for good.", offer.name)
        else:
            try:
                delete(offer.name)
            except UsageError as error:
                self._ask(str(error))
            else:
                self._fill(offer.name)

    def _ask(self, question: str, deleting: str = "") -> None:
        self._deleting = deleting
        self.query_one("#question", Static).update(Content(one_line(question)))


class EditScreen(EditPage):
    """A preset as text, under a name; saved only when it is one. Dismissed with the name it is saved under, or None.
    Another preset of that name would be lost too."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.preset_name, self.preset_text = name, text

    def compose(self) -> ComposeResult:
        with Frame("Preset", EDIT_KEYS):
            yield OrderedInput(self.preset_name, placeholder="name")
            yield OrderedTextArea(self.preset_text, soft_wrap=False, show_line_numbers=False)
            yield self.problem_line

    @property
    def edited(self) -> tuple[str, str]:
        return self.query_one(Input).value.strip(), self.query_one(TextArea).text

    def action_save(self) -> None:
        name, text = self.edited
        entry = entries().get(name)
        is_another = entry is not None and not entry.built_in and name != self.preset_name
        question = f"There is a preset {name} of your own. Ctrl+S again replaces it."
        if is_another and not self.is_sure(f"replace {name}", question):
            return
        try:
            save(name, text)
        except UsageError as error:
            self.say(str(error))
        else:
            self.dismiss(name)


def _line(offer: PresetListing) -> Content:
    """Two lines: name and title, and what was measured or why it cannot be had."""
    style = "$foreground 65% strike" if offer.problem else "bold"
    mark = "▸ " if offer.is_active else "  "
    own = "" if offer.built_in else "  your own"
    second = f"not available: {offer.problem}" if offer.problem else offer.speeds or "not measured yet"
    return Content.assemble(
        mark,
        (one_line(offer.name), style),
        (f"  {one_line(offer.title)}{own}", "$foreground 65%" if offer.problem else "$foreground 80%"),
        "\n",
        (f"    {one_line(second)}", "$foreground 65%"),
    )


def _text(path: Path) -> str:
    try:
        return clean(path.read_text("utf-8", errors="replace"))
    except OSError:
        return ""
