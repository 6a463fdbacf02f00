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

from app.screens.page import Frame, Page
from app.setup import Offer, Setup
from engine.errors import UsageError
from presets.loader import save
from widgets.text import clean, one_line

KEYS = "Enter chooses · Esc closes · F2 edits, as a preset of your own"
EDIT_KEYS = "Ctrl+S saves · Esc closes · Tab to the name"


class PresetsScreen(Page[str | None]):
    """Dismissed with the name of the preset to go over to, or None."""

    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("escape", "dismiss", "Close"),
        Binding("f2", "edit", "Edit"),
    ]

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup

    def compose(self) -> ComposeResult:
        with Frame("Presets", KEYS):
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self.list = self.query_one(OptionList)
        self.list.focus()
        self._fill()

    def _fill(self) -> None:
        offers = self.setup.offers()
        self.list.clear_options()
        for offer in offers:
            self.list.add_option(Option(_line(offer), id=offer.name, disabled=False))
        self.list.highlighted = next((i for i, offer in enumerate(offers) if offer.is_active), 0)

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)

    def action_edit(self) -> None:
        if (index := self.list.highlighted) is None:
            return
        name = self.list.get_option_at_index(index).id
        offer = next(offer for offer in self.setup.offers() if offer.name == name)
        self.app.push_screen(EditScreen(offer.name, _text(offer.path)), lambda _: self._fill())


class EditScreen(Page[None]):
    """A preset as text, under a name; saved only when it is one."""

    DEFAULT_CSS = """
    EditScreen TextArea, EditScreen TextArea:focus { height: 1fr; border: none; margin: 1 0; padding: 0; }
    EditScreen #problem { height: auto; max-height: 4; color: $text-warning; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("escape", "dismiss", "Close", priority=True),
        Binding("ctrl+s", "save", "Save", priority=True),
    ]

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.preset_name, self.preset_text = name, text

    def compose(self) -> ComposeResult:
        with Frame("Preset", EDIT_KEYS):
            yield Input(self.preset_name, placeholder="name")
            yield TextArea(self.preset_text, soft_wrap=False, show_line_numbers=False)
            yield Static(id="problem", markup=False)

    def on_mount(self) -> None:
        self.query_one(TextArea).focus()

    def action_save(self) -> None:
        try:
            save(self.query_one(Input).value.strip(), self.query_one(TextArea).text)
        except UsageError as error:
            self.query_one("#problem", Static).update(Content(one_line(str(error))))
        else:
            self.dismiss()


def _line(offer: Offer) -> Content:
    """Two lines: name and title, and what was measured or why it cannot be had."""
    style = "$foreground 40%" if offer.problem else ""
    mark = "▸ " if offer.is_active else "  "
    own = "" if offer.built_in else "  your own"
    second = f"not available: {offer.problem}" if offer.problem else offer.evidence or "not measured yet"
    return Content.assemble(
        (mark + one_line(offer.name), f"bold {style}".strip()),
        (f"  {one_line(offer.title)}{own}", style or "$foreground 70%"),
        "\n",
        (f"    {one_line(second)}", "$foreground 45%"),
    )


def _text(path: Path) -> str:
    try:
        return clean(path.read_text("utf-8", errors="replace"))
    except OSError:
        return ""
