"""Tables in lines. Where columns would be too narrow to read, each row is a list of its fields."""

from collections.abc import Sequence
from itertools import zip_longest

from textual.content import Content

from widgets.markdown.lines import Line, wrapped

NARROWEST_COLUMN = 5
_GRID = "$foreground 20%"

Row = Sequence[Content]


def column_widths(rows: Sequence[Row]) -> list[int]:
    """What each column of `rows` needs, in cells."""
    columns = max((len(row) for row in rows), default=0)
    return [max((_width(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]


def fitting_widths(needed: Sequence[int], width: int) -> list[int] | None:
    """The columns' widths in a table of `width` cells: wide ones give way to narrow ones. None if there is no room."""
    room = width - 3 * len(needed) - 1
    if sum(needed) <= room:
        return list(needed)
    if room < NARROWEST_COLUMN * len(needed):
        return None
    widths, left = list(needed), list(range(len(needed)))
    while True:
        share = (room - sum(widths[i] for i in range(len(needed)) if i not in left)) // max(1, len(left))
        narrow = [i for i in left if needed[i] <= share]
        if not narrow:
            break
        left = [i for i in left if i not in narrow]
    for i in left:
        widths[i] = share
    return widths


def rule(widths: Sequence[int], left: str, inner: str, right: str) -> Line:
    """A horizontal line of the grid with its left, inner and right crossings."""
    text = left + inner.join("─" * (width + 2) for width in widths) + right
    return Line(Content.styled(text, _GRID), len(text))


def row_lines(row: Row, widths: Sequence[int], aligns: Sequence[str], style: str = "") -> list[Line]:
    """A row between the bars of the grid, in as many lines as its tallest cell has."""
    cells = [
        [_aligned(line.content, width, align) for line in wrapped(cell, width)]
        for cell, width, align in zip(row, widths, aligns, strict=False)
    ]
    bar = Content.styled("│", _GRID)
    lines = []
    for parts in zip_longest(*cells):
        texts = [part or Content(" " * w) for part, w in zip(parts, widths, strict=True)]
        body = Content(" ") + (Content(" ") + bar + Content(" ")).join(texts) + Content(" ")
        lines.append(Line(bar + (body.stylize_before(style) if style else body) + bar, 2))
    return lines


def field_lines(header: Row, row: Row, width: int) -> list[Line]:
    """A row as `header: cell`, a field a line, and a rule after it."""
    lines = []
    for name, cell in zip_longest(header, row, fillvalue=Content("")):
        label = name.stylize_before(".table_header") + Content(": ") if name else Content("")
        lines += wrapped(label + cell, width)
    return [*lines, Line(Content.styled("─" * width, _GRID), width)]


def _width(cell: Content) -> int:
    return max((part.cell_length for part in cell.split("\n", allow_blank=True)), default=0)


def _aligned(text: Content, width: int, align: str) -> Content:
    space = max(0, width - text.cell_length)
    left = {"right": space, "center": space // 2}.get(align, 0)
    return text.pad_left(left).pad_right(space - left)
