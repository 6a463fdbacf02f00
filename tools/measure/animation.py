"""Pictures of a terminal over time as one animated SVG, which browsers play without a script.

A row that stays as it is for several frames is drawn once, and shown for as long as that is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 8.4, 18, 14  # pixels
MARGIN = 12


@dataclass(frozen=True)
class Frame:
    """What the terminal shows from `at_s` on, in seconds since the recording began: a strip for each row."""

    at_s: float
    rows: tuple[Strip, ...]


def without_waits(frames: Sequence[Frame], longest_s: float) -> list[Frame]:
    """The frames with every wait in which nothing changes cut to `longest_s` seconds."""
    shortened: list[Frame] = []
    at_s, before_s = 0.0, frames[0].at_s if frames else 0.0
    for frame in frames:
        at_s += min(longest_s, frame.at_s - before_s)
        before_s = frame.at_s
        shortened.append(Frame(at_s, frame.rows))
    return shortened


def animated_svg(frames: Sequence[Frame], end_s: float, *, foreground: str, background: str) -> str:
    """The SVG document. The animation lasts `end_s` seconds and begins anew. Colours are those of cells without one."""
    columns = max(strip.cell_length for frame in frames for strip in frame.rows)
    rows = max(len(frame.rows) for frame in frames)
    width, height = columns * CELL_WIDTH + 2 * MARGIN, rows * CELL_HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>text {{ font: {FONT_SIZE}px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; "
        "white-space: pre; }</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{background}"/>',
        f'<g fill="{foreground}">',  # of text without a colour of its own
    ]
    for y in range(rows):
        for first_s, last_s, strip in _intervals(frames, y, end_s):
            drawn = _row(strip, y)
            if drawn:
                parts.append(f"<g>{_shown(first_s, last_s, end_s)}{drawn}</g>")
    return "\n".join([*parts, "</g>", "</svg>\n"])


def _intervals(frames: Sequence[Frame], y: int, end_s: float) -> list[tuple[float, float, Strip]]:
    """From when to when row `y` looked how."""
    intervals: list[tuple[float, float, Strip]] = []
    for i, frame in enumerate(frames):
        if y >= len(frame.rows):
            continue
        until_s = frames[i + 1].at_s if i + 1 < len(frames) else end_s
        if intervals and intervals[-1][1] == frame.at_s and list(intervals[-1][2]) == list(frame.rows[y]):
            intervals[-1] = (intervals[-1][0], until_s, frame.rows[y])
        else:
            intervals.append((frame.at_s, until_s, frame.rows[y]))
    return intervals


def _shown(first_s: float, last_s: float, end_s: float) -> str:
    """The animation that shows a row for a part of the time only."""
    if first_s <= 0 and last_s >= end_s:
        return ""
    values, times = ["hidden", "visible"], [0.0, first_s / end_s]
    if first_s <= 0:
        values, times = ["visible"], [0.0]
    if last_s < end_s:
        values.append("hidden")
        times.append(last_s / end_s)
    return (
        f'<animate attributeName="visibility" calcMode="discrete" dur="{end_s:.2f}s" repeatCount="indefinite" '
        f'values="{";".join(values)}" keyTimes="{";".join(f"{time:.5f}" for time in times)}"/>'
    )


def _row(strip: Strip, y: int) -> str:
    parts, x = [], 0
    for segment in Segment.simplify(strip):
        cells = segment.cell_length
        parts.append(_segment(segment.text, segment.style or Style(), x, y, cells))
        x += cells
    return "".join(parts)


def _segment(text: str, style: Style, x: int, y: int, cells: int) -> str:
    left, top = MARGIN + x * CELL_WIDTH, MARGIN + y * CELL_HEIGHT
    colour, behind = _hex(style.color), _hex(style.bgcolor)
    if style.reverse:
        colour, behind = behind, colour
    drawn = ""
    if behind:
        size = f'width="{cells * CELL_WIDTH:.1f}" height="{CELL_HEIGHT}"'
        drawn += f'<rect x="{left:.1f}" y="{top}" {size} fill="{behind}"/>'
    if text.strip():
        start = len(text) - len(text.lstrip())
        shown = text.strip()
        attributes = "".join(
            f' {name}="{value}"'
            for name, value, holds in (
                ("fill", colour, colour),
                ("font-weight", "bold", style.bold),
                ("font-style", "italic", style.italic),
                ("text-decoration", "underline", style.underline),
                ("opacity", "0.6", style.dim),
            )
            if holds
        )
        length = Segment(shown).cell_length * CELL_WIDTH
        drawn += (
            f'<text x="{left + start * CELL_WIDTH:.1f}" y="{top + FONT_SIZE}" textLength="{length:.1f}"'
            f"{attributes}>{escape(shown)}</text>"
        )
    return drawn


def _hex(colour: object) -> str:
    """A rich colour as "#rrggbb", "" for the terminal's own."""
    from rich.color import Color

    if not isinstance(colour, Color) or colour.is_default:
        return ""
    return colour.get_truecolor().hex
