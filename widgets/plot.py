"""Plots of columns in braille: two columns and four rows of dots a cell."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import NamedTuple

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row from the top, then by column
_BLANK = 0x2800


class Column(NamedTuple):
    """One column of dots. Values and line are shares of the plot's height (None: nothing there); a hatched
    column has every other dot."""

    value: float | None
    line: float | None = None
    hatched: bool = False


class Cell(NamedTuple):
    """`kind`: what the cell shows, for its colour."""

    text: str
    kind: str  # "value", "hatched", "line" or ""


def cells(columns: Sequence[Column], width: int, height: int) -> list[list[Cell]]:
    """The last columns that `width` x `height` cells hold, at their right: rows of cells from the top.

    Values fill their columns from the bottom, at least one dot where there is a value; the line is one dot
    a column, seen where no value covers it.
    """
    shown = list(columns[-2 * width :])
    shown = [Column(None)] * (2 * width - len(shown)) + shown
    dots = height * 4
    tops = [0 if c.value is None else max(1, round(min(1.0, c.value) * dots)) for c in shown]
    lines = [None if c.line is None else dots - max(1, round(min(1.0, c.line) * dots)) for c in shown]
    rows = []
    for y in range(height):
        row = []
        for x in range(width):
            bits, kind = 0, ""
            for right in (0, 1):
                i = 2 * x + right
                for dot in range(4):
                    at = 4 * y + dot
                    if at >= dots - tops[i]:
                        if not shown[i].hatched or (at + right) % 2:
                            bits |= _DOTS[dot][right]
                        kind = "hatched" if shown[i].hatched else "value"
                    elif at == lines[i]:
                        bits |= _DOTS[dot][right]
                        kind = kind or "line"
            row.append(Cell(chr(_BLANK + bits) if bits else " ", kind))
        rows.append(row)
    return rows


def nice_top(value: float) -> float:
    """The least of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten that is not below `value`: where an axis
    ends. 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def figure(value: float) -> str:
    """At most four characters and a unit: 0.52, 9.1, 84, 790, 2.1k, 39k."""
    if value < 0.995:
        return f"{value:.2f}"
    if value < 9.95:
        return f"{value:.1f}"
    if value < 999.5:
        return f"{value:.0f}"
    return f"{figure(value / 1000)}k" if value < 999_500 else f"{figure(value / 1e6)}M"


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` cells, in eighths of a cell; a sliver where there is anything at all."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8 : eighths % 8 + 1].strip()).ljust(width)[:width]
