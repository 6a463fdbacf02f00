"""NO_COLOR (https://no-color.org): no colours at all, greys neither. Textual would paint in greys."""

import os
from functools import lru_cache
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter, Monochrome, NoColor

_STANDS_OUT = 0.07
"""A background that is so much brighter or darker than the screen's marks what is chosen. It is shown reversed."""


class WithoutColor(LineFilter):
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, style and _plain(style, background.brightness), control)
            for text, style, control in segments
        ]


@lru_cache(1024)
def _plain(style: Style, brightness: float) -> Style:
    """The style with its attributes alone."""
    below = style.bgcolor and not style.bgcolor.is_default and Color.from_rich_color(style.bgcolor).brightness
    stands_out = isinstance(below, float) and abs(below - brightness) > _STANDS_OUT
    return style.without_color + Style(reverse=True) if stands_out else style.without_color


def respect_no_color(app: App[Any]) -> None:
    """To be called once; does something only if NO_COLOR is set. If it is empty it does not count, but to Textual it
    does."""
    app.no_color = bool(os.environ.get("NO_COLOR"))
    filters = app._filters
    app._filters = [WithoutColor() if isinstance(each, Monochrome) else each for each in filters]
    if not app.no_color:
        app._filters = [each for each in app._filters if not isinstance(each, WithoutColor | NoColor)]
