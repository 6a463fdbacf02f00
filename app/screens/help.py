"""All keys on one page."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Grid, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from app.actions import ACTIONS, OTHER_KEYS, key_label


class HelpScreen(ModalScreen[None]):
    DEFAULT_CSS = """
    HelpScreen { align: center middle; background: $background 60%; }
    HelpScreen > VerticalScroll {
        width: 92; max-width: 100%; height: auto; max-height: 100%;
        padding: 1 2 0 2; background: $background; scrollbar-size-vertical: 1;
        border: round $primary 60%; border-title-color: $text; border-subtitle-color: $text-muted;
    }
    HelpScreen Grid {
        grid-size: 2; grid-columns: 20 1fr; grid-rows: auto; height: auto; margin-bottom: 1;
    }
    HelpScreen .key { text-style: bold; color: $text-primary; }
    """
    BINDINGS = [Binding("escape,f1,q,enter", "dismiss", "Close")]  # noqa: RUF012 (declared so by Textual)

    def compose(self) -> ComposeResult:
        actions = tuple((key_label(action.key), action.help) for action in ACTIONS)
        with VerticalScroll() as page:
            page.border_title = "Keys"
            page.border_subtitle = "Esc closes"
            for table in (actions, OTHER_KEYS):
                with Grid():
                    for key, help in table:
                        yield Static(key, markup=False, classes="key")
                        yield Static(help, markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
