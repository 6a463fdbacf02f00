"""The recording of a terminal as an animated picture."""

import xml.etree.ElementTree as ET

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from tools.measure.animation import Frame, animated_svg, without_waits

SVG = "{http://www.w3.org/2000/svg}"


def frame(at_s: float, *rows: str) -> Frame:
    style = Style(color="#ff0000", bgcolor="#00ff00", bold=True)
    return Frame(at_s, tuple(Strip([Segment(row, style)]) for row in rows))


def groups(frames: list[Frame], end_s: float) -> list[tuple[str, str | None, str | None]]:
    """Each row: its text, and when it is visible."""
    root = ET.fromstring(animated_svg(frames, end_s, foreground="#ffffff", background="#000000"))
    found = []
    [rows] = root.findall(f"{SVG}g")
    for group in rows:
        text, animate = group.find(f"{SVG}text"), group.find(f"{SVG}animate")
        times = None if animate is None else (animate.get("values"), animate.get("keyTimes"))
        found.append((text.text if text is not None else "", *(times or (None, None))))
    return found


def test_a_row_is_drawn_once_for_as_long_as_it_stays():
    frames = [frame(0, "title", "one"), frame(1, "title", "two"), frame(3, "title", "one")]
    assert groups(frames, 4) == [
        ("title", None, None),
        ("one", "visible;hidden", "0.00000;0.25000"),
        ("two", "hidden;visible;hidden", "0.00000;0.25000;0.75000"),
        ("one", "hidden;visible", "0.00000;0.75000"),
    ]


def test_text_is_data_and_has_its_colours():
    svg = animated_svg([frame(0, "<b>&amp;")], 1, foreground="#ffffff", background="#000000")
    [text] = ET.fromstring(svg).iter(f"{SVG}text")
    assert text.text == "<b>&amp;"
    assert (text.get("fill"), text.get("font-weight")) == ("#ff0000", "bold")
    assert 'fill="#00ff00"' in svg


def test_waits_are_cut_and_the_rest_keeps_its_time():
    cut = without_waits([frame(0.5, "a"), frame(0.7, "b"), frame(60.7, "c"), frame(61.0, "d")], 1.0)
    assert [round(shown.at_s, 2) for shown in cut] == [0, 0.2, 1.2, 1.5]
