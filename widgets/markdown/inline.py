"""Inline Markdown as styled text. Styles are component classes (`.strong`) of the widget that draws it."""

import os
import re

from markdown_it.token import Token
from textual.content import Content, Span
from textual.style import Style

TERMINAL_HAS_LINKS = os.environ.get("TERM", "") not in ("linux", "vt100", "vt220", "screen", "dumb")
"""Else the address stands behind the link."""
_ADDRESS = re.compile(r"(?:https?://|mailto:)[!-~]{1,2000}")
_FOOTNOTE = re.compile(r"\[\^(\d{1,3})\]")  # the mark, and what begins the note
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SPACES = re.compile(r"\s+")
_STYLES = {"em_open": ".em", "strong_open": ".strong", "s_open": ".s"}


def _link(address: str) -> Style:
    """A click runs the action `link(address)` of the widget. The terminal gets addresses of the web and of mail, too
    (OSC 8, https://gist.github.com/egmontkob/eb114294efbcd5adb1944c9f3cb5feda); markdown-it has escaped them."""
    style = Style.from_meta({"@click": f"link({address!r})"}) + Style(underline=True)
    return style + Style(link=address) if _ADDRESS.fullmatch(address) else style


def styled(inline: Token) -> Content:
    """The text of an inline token. A click on a link runs the action `link(address)` of the widget."""
    texts: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[int, Style | str]] = []
    position = 0
    for child in inline.children or ():
        text = ""
        if child.type == "text":
            text = _FOOTNOTE.sub(lambda mark: mark[1].translate(_RAISED), _SPACES.sub(" ", child.content))
        elif child.type == "hardbreak":
            text = "\n"
        elif child.type == "code_inline":
            text = child.content
            spans.append(Span(position, position + len(text), ".code_inline"))
        elif child.type == "link_open":
            opened.append((position, _link(str(child.attrs.get("href", "")))))
        elif child.type in _STYLES:
            opened.append((position, _STYLES[child.type]))
        elif child.type.endswith("_close") and opened:
            start, style = opened.pop()
            spans.append(Span(start, position, style))
            if isinstance(style, Style) and style.link and not TERMINAL_HAS_LINKS:
                text = "" if "".join(texts)[start:] == style.link else f" ({style.link})"
        texts.append(text)
        position += len(text)
    return Content("".join(texts), spans=spans)
