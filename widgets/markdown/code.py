"""Code blocks: plain while they grow, highlighted once when they are complete."""

from __future__ import annotations

from functools import lru_cache

from textual.content import Content
from textual.highlight import HighlightTheme, highlight

HIGHLIGHT_LIMIT_CHARS = 20_000
"""Longer code stays plain: highlighting takes 2 ms a kilobyte, on the thread that draws."""


class CodeTheme(HighlightTheme):
    """Textual's, without its underlines: in a terminal those are links."""

    STYLES = {kind: style.replace(" underline", "") for kind, style in HighlightTheme.STYLES.items()}


def code_lines(code: str, info: str) -> list[Content]:
    """The lines of a complete block of code, highlighted as `info`, the words after its opening mark, says."""
    if len(code) > HIGHLIGHT_LIMIT_CHARS:
        return [Content(line) for line in code.split("\n")]
    return _highlighted(code, (info.split() or ["text"])[0])


@lru_cache(maxsize=64)
def _highlighted(code: str, language: str) -> list[Content]:
    content = highlight(code, language=language, theme=CodeTheme)
    lines = content.split("\n", allow_blank=True)
    return lines[: len(code.split("\n"))]
