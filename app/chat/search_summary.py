"""What the search for faster kernels found while an engine started, in words."""

from __future__ import annotations

from math import prod

from engine.events import Event, Search, Warming


class Found:
    """Folds an engine's events; `words` tell what came of its search."""

    def __init__(self) -> None:
        self._products: dict[str, Search] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Warming) and event.search is not None:
            self._products[event.search.what] = event.search

    @property
    def words(self) -> str:
        """ "" where there was no search. The products of a step are searched one after the other, so their gains
        multiply."""
        if not self._products:
            return ""
        searched = [s for s in self._products.values() if not s.found]
        if not searched:
            return "its search was known from an earlier start"
        gain = prod(s.before_us / s.after_us for s in searched if s.after_us) - 1
        return (
            f"its search made a step {gain:.0%} faster"
            if gain >= 0.005
            else "its search found nothing faster"
        )
