"""A small picture in half blocks: a cell shows two pixels, the upper one as its text and the lower one behind it."""

from textual.color import Color
from textual.content import Content
from textual.style import Style

from widgets.markdown.lines import Line
from widgets.turn import PictureFile


def thumbnail_lines(picture: PictureFile, width: int) -> list[Line]:
    """The rows of a picture's thumbnail, in at most `width` cells; none if it has no thumbnail. Nothing of them is
    copied."""
    n_columns = picture.thumbnail_width
    n_rows = len(picture.thumbnail) // (3 * n_columns) if n_columns else 0
    shown = min(n_columns, max(1, width))
    columns = [x * n_columns // shown for x in range(shown)]
    rows = [y * n_columns // shown for y in range(max(1, n_rows * shown // n_columns))] if n_rows else []

    def pixel(x: int, y: int) -> Color:
        at = 3 * (y * n_columns + x)
        return Color(*picture.thumbnail[at : at + 3])

    lines = []
    for upper, lower in zip(rows[::2], [*rows[1::2], None], strict=False):
        cells = (
            ("▀", Style(foreground=pixel(x, upper), background=None if lower is None else pixel(x, lower)))
            for x in columns
        )
        lines.append(Line(Content.assemble(*cells), decoration=shown, end=""))
    if lines:
        lines[-1].end = "\n"
    return lines
