"""The page of all keys and labels."""

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Grid, VerticalScroll
from textual.widgets import Static

from app.screens.actions import ACTIONS, OTHER_KEYS, PANE_KEYS, key_label
from widgets.labels import LABELS
from widgets.page import Frame, Page


class HelpScreen(Page[None]):
    DEFAULT_CSS = """
    HelpScreen > Frame { width: 92; height: auto; min-height: 0; padding: 1 2 0 2; }
    HelpScreen VerticalScroll { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
    HelpScreen Grid {
        grid-size: 2; grid-columns: 20 1fr; grid-rows: auto; height: auto; margin-bottom: 1;
    }
    HelpScreen.-stacked Grid { grid-size: 1; grid-columns: 1fr; }
    HelpScreen.-stacked .help { padding-left: 2; }
    HelpScreen .key { padding-right: 1; text-style: bold; color: $text-primary; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-stacked"), (60, "-columns")]
    BINDINGS = [Binding("escape,f1,q,enter", "dismiss", "Close", priority=True)]

    def compose(self) -> ComposeResult:
        actions = tuple((key_label(action.key), action.help) for action in ACTIONS)
        with (
            Frame("Keys, and what labels mean", "Up and Down scroll · Esc closes", "Esc closes"),
            VerticalScroll(),
        ):
            labels = tuple((label, meaning) for table in LABELS.values() for label, meaning in table.items())
            for table in (actions, OTHER_KEYS, PANE_KEYS, labels):
                with Grid():
                    for key, help in table:
                        yield Static(key, markup=False, classes="key")
                        yield Static(help, markup=False, classes="help")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
