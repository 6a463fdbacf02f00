"""The palette of commands, for terminals of any size."""

from textual.binding import Binding
from textual.command import CommandPalette


class Palette(CommandPalette):
    DEFAULT_CSS = """
    Palette.-short > Vertical, Palette.-short SearchIcon { margin-top: 0; }
    Palette.-short #--input, Palette.-short #--input.--list-visible { border: none; }
    Palette.-short CommandInput { border: none; height: 1; }
    Palette.-short CommandList {
        border: none; max-height: 90vh; text-wrap: nowrap; text-overflow: ellipsis; scrollbar-size-vertical: 1;
    }
    Palette.-short CommandList > .option-list--option { padding: 0 1; }
    """
    # With priority, since a key that waits in the palette while it closes would be lost.
    BINDINGS = [Binding("escape", "escape", "Close", priority=True)]
