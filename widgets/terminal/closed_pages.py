"""Frees what was drawn of pages that are closed.

Textual 8.2 remembers 1,024 results of a method by the object that it is called on, and that holds all rows of a
widget: each page that was opened left 0.3 MB, until the first of them was forgotten after a hundred more.
"""

from functools import lru_cache, partial

from textual._styles_cache import StylesCache
from textual.color import Color
from textual.style import Style

_inner_outer = lru_cache(1024)(partial(StylesCache.get_inner_outer.__wrapped__, None))


def _by_colors(_: StylesCache, base_background: Color, background: Color) -> tuple[Style, Style]:
    return _inner_outer(base_background, background)


StylesCache.get_inner_outer = _by_colors  # type: ignore[method-assign, assignment]
