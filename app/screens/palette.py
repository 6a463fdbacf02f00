"""The palette of commands, for terminals of any size."""

from contextlib import suppress

from textual.binding import Binding
from textual.command import CommandList, CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.css.query import NoMatches

from widgets.page import EVERYWHERE

_BY_HELP = 0.01
"""The score of a command that is found by what it does. It is below the score of one that is found by its title."""


class Commands(Provider):
    """The commands of the application, found by their titles, or by words of what they do."""

    async def discover(self) -> Hits:
        for title, help, run, *_ in sorted(
            self.app.get_system_commands(self.screen), key=lambda each: each[0]
        ):
            yield DiscoveryHit(title, run, help=self._shown(help))

    async def search(self, query: str) -> Hits:
        matcher, words = self.matcher(query), query.lower().split()
        for title, help, run, *_ in self.app.get_system_commands(self.screen):
            if (score := matcher.match(title)) > 0:
                yield Hit(score, matcher.highlight(title), run, help=self._shown(help))
            elif all(word in help.lower() for word in words):
                yield Hit(_BY_HELP, title, run, help=self._shown(help))

    def _shown(self, help: str) -> str | None:
        """On a short terminal, each command has one line."""
        return None if self.screen.has_class("-short") else help


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
    BINDINGS = [Binding("escape", "escape", "Close", priority=True), *EVERYWHERE]

    # Keys may come before the list is there, before it has a size, and after it is gone: then they mean nothing.

    def _action_command_list(self, action: str) -> None:
        with suppress(NoMatches):
            if self.query_one(CommandList).size:
                super()._action_command_list(action)

    def _action_cursor_down(self) -> None:
        with suppress(NoMatches):
            super()._action_cursor_down()

    def _watch__list_visible(self) -> None:
        with suppress(NoMatches):
            super()._watch__list_visible()

    async def _watch__show_busy(self) -> None:
        with suppress(NoMatches):
            await super()._watch__show_busy()

    def _gather_commands(self, search_value: str) -> None:  # type: ignore[override]
        if self.is_current and self.query(CommandList):
            super()._gather_commands(search_value)
