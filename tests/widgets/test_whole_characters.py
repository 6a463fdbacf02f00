import pytest
from rich.segment import Segment
from rich.style import Style
from textual.content import Content

import widgets.terminal.paced_output  # noqa: F401 (changes Rich)


@pytest.mark.parametrize(
    ("text", "cut", "parts"),
    [
        ("a👨‍👩‍👧‍👦b", 1, ("a", "👨‍👩‍👧‍👦b")),
        ("a👨‍👩‍👧‍👦b", 2, ("a ", " b")),
        ("a👨‍👩‍👧‍👦b", 3, ("a👨‍👩‍👧‍👦", "b")),
        ("1️⃣x", 2, ("1️⃣", "x")),
        ("❤️x", 1, (" ", " x")),
        ("a🇫🇷🇩🇪b", 2, ("a ", " 🇩🇪b")),
        ("a🇫🇷🇩🇪b", 3, ("a🇫🇷", "🇩🇪b")),
        ("👨\u200d🇫🇷\u0301b", 2, ("👨\u200d🇫", "🇷\u0301b")),
        ("e\u0301a", 1, ("e\u0301", "a")),
        ("漢字", 3, ("漢 ", " ")),
        ("漢字", 0, ("", "漢字")),
        ("漢字", 9, ("漢字", "")),
    ],
)
def test_a_part_of_a_row_is_cut_between_characters(text, cut, parts):
    style = Style(bold=True)
    assert Segment(text, style).split_cells(cut) == tuple(Segment(part, style) for part in parts)


def test_lines_are_broken_between_flags():
    assert [line.plain for line in Content("a🇫🇷🇩🇪b").wrap(2)] == ["a", "🇫🇷", "🇩🇪", "b"]
