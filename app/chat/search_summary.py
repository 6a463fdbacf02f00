"""Sums up the search for faster kernels that ran while an engine started."""

from __future__ import annotations

from math import prod

from engine.events import Event, Search, Warming


class SearchSummary:
    """Collects the last `Search` of each product from an engine's events."""

    def __init__(self) -> None:
        self._searches: dict[str, Search] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Warming) and event.search is not None:
            self._searches[event.search.what] = event.search

    @property
    def has_searched(self) -> bool:
        """Whether anything was searched that was not known from an earlier start."""
        return any(not search.found for search in self._searches.values())

    @property
    def text(self) -> str:
        """The result in a few words; "" if nothing was searched. The products of a decode step are searched one
        after the other, each in a step that has the ones before, so their gains multiply."""
        if not self._searches:
            return ""
        searches = [search for search in self._searches.values() if not search.found]
        if not searches:
            return "its search was known from an earlier start"
        gain = prod(search.before_us / search.after_us for search in searches if search.after_us) - 1
        return (
            f"its search made a step {gain:.0%} faster"
            if gain >= 0.005
            else "its search found nothing faster"
        )
