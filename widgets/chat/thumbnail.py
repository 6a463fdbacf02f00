"""Small pictures in half blocks: a cell shows two pixels, the upper one as its text and the lower one behind it. Where
the terminal draws pictures itself, `terminal_pictures` puts finer ones in their place."""

from collections.abc import Sequence
from itertools import zip_longest

from textual.color import Color
from textual.content import Content
from textual.style import Style

from widgets.chat.turn import PictureFile
from widgets.markdown.lines import Line
from widgets.terminal.terminal_pictures import HALF_BLOCK, PART

_GAP = 2
"""Cells between two pictures."""


def thumbnail_lines(pictures: Sequence[PictureFile], width: int) -> list[Line]:
    """The rows of the thumbnails of pictures, beside each other as far as `width` cells go. Nothing of them is
    copied."""
    lines: list[Line] = []
    beside: list[list[Content]] = []
    for picture in pictures:
        rows = _rows(picture, width)
        if beside and rows and sum(each[0].cell_length + _GAP for each in (*beside, rows)) - _GAP > width:
            lines += _joined(beside)
            beside = []
        beside += [rows] if rows else []
    return lines + _joined(beside)


def thumbnail_number(picture: PictureFile) -> int:
    """A number that tells pictures apart by what their thumbnails show."""
    return hash((picture.thumbnail, picture.thumbnail_width))


def _joined(pictures: Sequence[Sequence[Content]]) -> list[Line]:
    widths = [rows[0].cell_length for rows in pictures]
    lines = []
    for parts in zip_longest(*pictures, fillvalue=Content("")):
        padded = (part.pad_right(width - part.cell_length) for part, width in zip(parts, widths, strict=True))
        content = Content(" " * _GAP).join(padded)
        lines.append(Line(content, decoration=len(content.plain), end=""))
    if lines:
        lines[-1].end = "\n"
    return lines


def _rows(picture: PictureFile, width: int) -> list[Content]:
    """A thumbnail in at most `width` cells; nothing if there is none."""
    n_columns = picture.thumbnail_width
    n_rows = len(picture.thumbnail) // (3 * n_columns) if n_columns > 0 else 0
    if not n_rows:
        return []
    shown = min(n_columns, max(1, width))
    columns = [x * n_columns // shown for x in range(shown)]
    rows = [y * n_columns // shown for y in range(max(1, n_rows * shown // n_columns))]

    def pixel(x: int, y: int) -> Color:
        at = 3 * (y * n_columns + x)
        return Color(*picture.thumbnail[at : at + 3])

    pairs, number = list(zip_longest(rows[::2], rows[1::2])), thumbnail_number(picture)

    def cell(x: int, row: int) -> tuple[str, Style]:
        upper, lower = pairs[row]
        behind = None if lower is None else pixel(columns[x], lower)
        look = Style(foreground=pixel(columns[x], upper), background=behind)
        return HALF_BLOCK, look + Style.from_meta({PART: (number, shown, len(pairs), x, row)})

    return [Content.assemble(*(cell(x, row) for x in range(shown))) for row in range(len(pairs))]
