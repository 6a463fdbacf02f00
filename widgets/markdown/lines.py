"""Lines of laid out text, which know how they are copied."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from textual.content import Content
from textual.strip import Strip


@dataclass(slots=True, eq=False)
class Line:
    """A row of the screen. The first `decoration` characters (indentation, bars) are not copied. `end` is what
    follows in the text: a line break or, where the row was wrapped, a space or nothing. `is_prompt`: the user wrote it.
    `strip` is the row as it was drawn last, with the key that it was drawn for."""

    content: Content
    decoration: int = 0
    end: str = "\n"
    is_prompt: bool = False
    strip: tuple[Any, Strip] | None = field(default=None, repr=False)


def wrapped(content: Content, width: int) -> list[Line]:
    """`content` in rows of `width` cells. Line breaks in it stay, long words are cut."""
    width = max(1, width)
    lines: list[Line] = []
    for paragraph in content.split("\n", allow_blank=True):
        if paragraph.cell_length <= width and "\t" not in paragraph.plain:
            lines.append(Line(paragraph))
            continue
        text, position = paragraph.expand_tabs(8), 0
        for row in text.wrap(width):
            position += len(row.plain)
            end = position
            while text.plain.startswith(" ", position):
                position += 1
            lines.append(Line(row, end=" " if position > end else ""))
        lines[-1].end = "\n"
    return lines


def indented(lines: Sequence[Line], first: Content | str, rest: Content | str | None) -> list[Line]:
    """The lines with `first` before the first of them and `rest` (None: spaces of the same width) before the others.
    A `first` that differs from `rest` is copied, as a list's bullet is."""
    first = Content(first) if isinstance(first, str) else first
    rest = Content(" " * first.cell_length) if rest is None else rest
    later = Content(rest) if isinstance(rest, str) else rest
    is_copied = first.plain != later.plain
    prefixes = [(first, not is_copied), *[(later, True)] * (len(lines) - 1)]
    return [
        Line(prefix + line.content, len(prefix.plain) + line.decoration if hidden else 0, line.end)
        for (prefix, hidden), line in zip(prefixes, lines, strict=False)
    ]


def filled(lines: Sequence[Line], width: int, style: str) -> list[Line]:
    """The lines in `style`, with one cell of it at both sides and up to `width`. Neither is copied."""
    rows = []
    for line in lines:
        padding = max(1, width - line.content.cell_length - 1)
        row = (Content(" ") + line.content + Content(" " * padding)).stylize_before(style)
        rows.append(Line(row, line.decoration + 1, line.end))
    return rows
