"""The base of the pages over the screen: a frame with a title and the keys."""

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, ScreenResultType

from widgets.text import longest_fitting

EVERYWHERE: list[BindingType] = [
    Binding("ctrl+c", "app.simulate_key('escape')", show=False),  # where no selection is copied
    Binding("alt+z", "app.suspend", show=False),
]
"""What keys do on every page. A modal screen gets none of the application's."""
_BORDER = 6  # cells of a border that a text in it cannot use


class Frame(Vertical):
    """Shows the title and the keys in its border. `keys` are the same in ever fewer words, for narrow terminals."""

    def __init__(self, title: str, *keys: str) -> None:
        super().__init__()
        self.keys = keys
        self.border_title = Content(title)  # no markup

    def on_resize(self) -> None:
        self.border_subtitle = Content(longest_fitting(self.keys, self.outer_size.width - _BORDER))


class Page(ModalScreen[ScreenResultType]):
    """Composes one `Frame`."""

    BINDINGS = EVERYWHERE

    DEFAULT_CSS = """
    Page { align: center middle; background: $background 60%; }
    Page > Frame {
        width: 100; max-width: 100%; height: 80%; min-height: 14; max-height: 100%;
        padding: 0 1; background: $background;
        border: round $primary 60%; border-title-color: $text; border-subtitle-color: $text-muted;
    }
    Page Input, Page Input:focus {
        border: none; height: 1; padding: 0 1; background: $surface; margin-bottom: 1;
    }
    """
