"""Braille plots, bars and the numbers beside them. A cell of braille has two columns and four rows of dots."""

import os
from collections.abc import Sequence
from math import floor, log10
from typing import NamedTuple

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits by row from the top, then by column
_BRAILLE = 0x2800
IS_CONSOLE = os.environ.get("TERM") == "linux"
"""The console of Linux has neither Braille nor eighths of blocks in its font, only halves."""


class Column(NamedTuple):
    """One column of dots. `value` and `line` are shares of the plot's height (None: not drawn). A hatched column
    has every other dot."""

    value: float | None
    line: float | None = None
    hatched: bool = False


class Cell(NamedTuple):
    text: str
    kind: str  # "value", "hatched", "line" or "" for a blank: it decides the colour


def cells(columns: Sequence[Column], width: int, height: int) -> list[list[Cell]]:
    """Rows of cells from the top. The last columns that fit are shown, at the right.

    A value fills its column from the bottom, with at least one dot. The line is one dot a column, which a value may
    cover.
    """
    shown = list(columns[-2 * width :])
    shown = [Column(None)] * (2 * width - len(shown)) + shown
    dots = height * 4
    value_dots = [0 if c.value is None else _dots(c.value, dots) for c in shown]
    line_dots = [None if c.line is None else dots - _dots(c.line, dots) for c in shown]  # from the top

    def cell(x: int, y: int) -> Cell:
        bits, kind = 0, ""
        for right in (0, 1):
            column = 2 * x + right
            for row in range(4):
                dot = 4 * y + row
                if dot >= dots - value_dots[column]:
                    is_hatched = shown[column].hatched
                    kind = "hatched" if is_hatched else "value"
                    if not is_hatched or (dot + right) % 2:
                        bits |= _DOTS[row][right]
                elif dot == line_dots[column]:
                    kind = kind or "line"
                    bits |= _DOTS[row][right]
        return Cell(_character(bits), kind)

    return [[cell(x, y) for x in range(width)] for y in range(height)]


def _character(bits: int) -> str:
    """The character with these dots; on a console, a block of the halves that have any."""
    if IS_CONSOLE:
        upper, lower = bits & 0x1B, bits & 0xE4
        return " ▀▄█"[bool(upper) + 2 * bool(lower)]
    return chr(_BRAILLE + bits) if bits else " "


def _dots(share: float, dots: int) -> int:
    return max(1, round(min(1.0, share) * dots))


def nice_top(value: float) -> float:
    """Where an axis for values up to `value` ends: 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def short_number(value: float) -> str:
    """A number in at most four characters: 0.52, 9.1, 84, 790, 2.1k, 39k, 1.5M."""
    for unit in ("", "k", "M"):
        if value < 999.5 or unit == "M":
            break
        value /= 1000
    digits = 2 if value < 0.995 else 1 if value < 9.95 else 0
    return f"{value:.{digits}f}{unit}"


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` cells, in eighths of a cell; at least an eighth if `share` is above 0."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    if IS_CONSOLE:
        eighths = -(-eighths // 4) * 4
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(width)[:width]


def blocks(values: Sequence[float], top: float) -> str:
    """A block for each value, in eighths of `top`; on a console in halves."""
    shares = [max(0.0, min(1.0, value / top)) if top > 0 else 0.0 for value in values]
    if IS_CONSOLE:
        return "".join("_▄█"[round(2 * share)] for share in shares)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * share))] for share in shares)
