"""Small pictures in half blocks."""

from textual.color import Color

from widgets.chat.thumbnail import thumbnail_lines
from widgets.chat.turn import PictureFile


def picture(width: int, height: int) -> PictureFile:
    """Each pixel has its place as its colour."""
    pixels = b"".join(bytes((x, y, 0)) for y in range(height) for x in range(width))
    return PictureFile(data=b"", thumbnail=pixels, thumbnail_width=width)


def test_a_cell_has_two_pixels():
    first, last = thumbnail_lines([picture(3, 3)], 10)
    assert first.content.plain == last.content.plain == "▀▀▀"
    style = first.content.spans[1].style
    assert (style.foreground, style.background) == (Color(1, 0, 0), Color(1, 1, 0))
    assert last.content.spans[2].style.foreground == Color(2, 2, 0)
    assert not last.content.spans[2].style.background


def test_pictures_stand_side_by_side_as_far_as_the_room_goes():
    lines = thumbnail_lines([picture(4, 2), PictureFile(data=b""), picture(2, 4), picture(40, 20)], 10)
    assert [line.content.plain for line in lines[:2]] == ["▀▀▀▀  ▀▀", "      ▀▀"]
    assert [line.content.plain for line in lines[2:]] == ["▀" * 10] * 3, "the wide one is made narrower"
    assert all(line.decoration == len(line.content.plain) for line in lines), "nothing is copied"
    assert thumbnail_lines([], 10) == []
