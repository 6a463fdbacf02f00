"""Inline Markdown as styled text. Styles are component classes (`.strong`) of the widget that draws it."""

import re

from markdown_it.token import Token
from textual.content import Content, Span
from textual.style import Style

_SPACES = re.compile(r"\s+")
_STYLES = {"em_open": ".em", "strong_open": ".strong", "s_open": ".s"}


def styled(inline: Token) -> Content:
    """The text of an inline token. A click on a link runs the action `link(address)` of the widget."""
    texts: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[int, Style | str]] = []
    position = 0
    for child in inline.children or ():
        text = ""
        if child.type == "text":
            text = _SPACES.sub(" ", child.content)
        elif child.type == "hardbreak":
            text = "\n"
        elif child.type == "code_inline":
            text = child.content
            spans.append(Span(position, position + len(text), ".code_inline"))
        elif child.type == "link_open":
            action = f"link({str(child.attrs.get('href', ''))!r})"
            opened.append((position, Style.from_meta({"@click": action}) + Style(underline=True)))
        elif child.type in _STYLES:
            opened.append((position, _STYLES[child.type]))
        elif child.type.endswith("_close") and opened:
            start, style = opened.pop()
            spans.append(Span(start, position, style))
        texts.append(text)
        position += len(text)
    return Content("".join(texts), spans=spans)
