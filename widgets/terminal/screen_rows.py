"""What the terminal shows, row by row, so that only cells that have changed are written.

Textual writes all of a widget that has changed: of a growing reply, the whole transcript.
"""

from collections.abc import Iterator, Mapping

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from textual.strip import Strip

_MOST_SHIFT = 8
"""Rows that a text may have moved up by, to be scrolled by the terminal."""
_FEWEST_ROWS = 4
_JOINER = "\u200d"
_FLAG_LETTERS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))
_Row = tuple[list[Segment], "list[_Cell]"]
_Cell = tuple[str, str] | None
"""A character, with what joins it, and its style; None: what else a wide one takes."""


class ScreenRows:
    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def forget(self) -> None:
        """What the terminal shows is not known any more."""
        self._rows.clear()

    def update(self, rows: Mapping[int, Strip], console: Console) -> str:
        """The sequence that makes the terminal show `rows`, by their place from the top; "" if it does already."""
        new: dict[int, _Row] = {}
        for y, strip in rows.items():
            segments = list(strip)
            known = self._rows.get(y)
            if known is None or known[0] != segments:
                new[y] = segments, _cells(segments, console)
        written = self._scrolled(new)
        for y, (segments, cells) in new.items():
            before = self._rows[y][1] if y in self._rows else []
            self._rows[y] = segments, cells
            first, last = _difference(before, cells)
            if first < last:
                written += f"\x1b[{y + 1};{first + 1}H{_written(segments, first, last, console)}"
        return written

    def _scrolled(self, new: dict[int, _Row]) -> str:
        """Lets the terminal move up the rows that are a few rows higher now; "" if there are none. Adds to `new` what
        it clears by that."""
        best = (0, 0, 0)  # how many rows, how far, the first of them
        for shift in range(1, _MOST_SHIFT + 1):
            run, before = 0, -1
            for y in sorted(new):
                run = run if y == before + 1 else 0
                before, source = y, self._rows.get(y + shift)
                is_moved = source is not None and source[1] == new[y][1]
                run = run + 1 if is_moved and (run or any(map(_is_visible, new[y][1]))) else 0
                best = max(best, (run, shift, y - run + 1))
        count, shift, top = best
        if count < _FEWEST_ROWS:
            return ""
        bottom = top + count - 1 + shift
        cleared = range(bottom - shift + 1, bottom + 1)
        for y in cleared:
            new.setdefault(y, self._rows[y])
        for y in range(top, top + count):
            self._rows[y] = self._rows[y + shift]
        for y in cleared:
            del self._rows[y]
        line_feeds = "\n" * shift
        return f"\x1b[0m\x1b[{top + 1};{bottom + 1}r\x1b[{bottom + 1};1H{line_feeds}\x1b[r"


def _cells(segments: list[Segment], console: Console) -> list[_Cell]:
    cells: list[_Cell] = []
    for text, style, control in segments:
        if control:
            continue
        look = ""
        if style is not None:
            look = (
                f"{style._make_ansi_codes(console._color_system)}{style.link or ''}"
                if console._color_system
                else ""
            )
        if text.isascii():
            cells += [(character, look) for character in text]
            continue
        for cluster in _clusters(text):
            if width := cell_len(cluster):
                cells += [(cluster, look), *[None] * (width - 1)]
            else:  # it joins what stands before it in another style
                place = next((place for place in range(len(cells) - 1, -1, -1) if cells[place]), 0)
                if cells and (before := cells[place]):
                    cells[place] = before[0] + cluster, before[1] + look
    return cells


def _clusters(text: str) -> Iterator[str]:
    """The characters of a text, each with what joins it. The two letters of a flag are one."""
    cluster = ""
    for character in text:
        is_joined = cluster.endswith(_JOINER) or (character in _FLAG_LETTERS and cluster in _FLAG_LETTERS)
        if cluster and not is_joined and cell_len(character):
            yield cluster
            cluster = ""
        cluster += character
    yield cluster


def _written(segments: list[Segment], first: int, last: int, console: Console) -> str:
    """The cells of a row from `first` on, up to `last`, for a cursor that is there. After a character of several code
    points, such as an emoji of a family, the cursor is told where to go on: terminals do not agree on its width. Its
    cells are blank first, or a narrower one would leave what was there: tmux shows 1️⃣ in one cell. (To crop the row
    would tear such characters apart.)"""
    parts, column = list[Segment](), 0
    for text, style, control in segments:
        if control:
            continue
        if text.isascii():
            parts.append(Segment(text[max(0, first - column) : max(0, last - column)], style))
            column += len(text)
            continue
        kept = ""
        for cluster in _clusters(text):
            width = cell_len(cluster)
            if first <= column < last if width else first < column <= last:
                is_uncertain = width > 1 and len(cluster) > 1
                kept += f"{' ' * width}\x1b[{column + 1}G{cluster}" if is_uncertain else cluster
                if len(cluster) > 1 or not width or cluster in _FLAG_LETTERS:
                    parts += Segment(kept, style), Segment(f"\x1b[{column + width + 1}G")
                    kept = ""
            column += width
        parts.append(Segment(kept, style))
    return Strip(part for part in parts if part.text).render(console)


def _difference(before: list[_Cell], after: list[_Cell]) -> tuple[int, int]:
    """The first cell that differs, and the one after the last. Both are at the edge of a character in both rows."""
    if len(before) != len(after):
        return 0, len(after)
    first, last = 0, len(after)
    while first < last and before[first] == after[first]:
        first += 1
    while last > first and before[last - 1] == after[last - 1]:
        last -= 1
    while 0 < first < last and (before[first] is None or after[first] is None):
        first -= 1
    while first < last < len(after) and (before[last] is None or after[last] is None):
        last += 1
    return first, last


def _is_visible(cell: _Cell) -> bool:
    return cell is not None and cell[0] != " "
