import pytest

from widgets.plot import Column, bar, cells, nice_top, short_number


def text(columns, width, height):
    return ["".join(cell.text for cell in row) for row in cells(columns, width, height)]


def test_columns_fill_from_the_bottom():
    assert text([Column(1.0), Column(0.5)], 1, 1) == ["⣧"]
    assert text([Column(1.0)] * 4, 2, 2) == ["⣿⣿", "⣿⣿"]
    assert text([Column(0.0), Column(0.001)], 1, 2) == [" ", "⣀"]


def test_the_last_columns_are_shown_at_the_right():
    rows = text([Column(0.1)] * 9 + [Column(1.0)], 2, 1)
    assert rows == ["⣀⣸"]
    assert text([Column(1.0)], 3, 1) == ["  ⢸"]
    assert text([], 3, 2) == ["   ", "   "]


def test_a_line_is_seen_where_no_value_covers_it():
    [top, bottom] = cells([Column(0.2, 1.0), Column(0.2, 1.0)], 1, 2)
    assert (top[0].text, top[0].kind, bottom[0].kind) == ("⠉", "line", "value")
    assert text([Column(1.0, 0.5)] * 2, 1, 1) == ["⣿"]
    assert text([Column(None, 0.5)] * 2, 1, 1) == ["⠤"]


def test_hatched_columns_look_different_without_colour():
    [[cell]] = cells([Column(1.0, None, True)] * 2, 1, 1)
    assert cell.kind == "hatched" and cell.text not in " ⣿"


@pytest.mark.parametrize("value", [1e-3, 0.7, 1, 1.01, 9.99, 10, 84, 100, 799, 801, 12345, 1e8])
def test_an_axis_ends_just_above(value):
    assert value * (1 - 1e-9) <= nice_top(value) <= 1.7 * value
    assert len(short_number(nice_top(value))) <= 4


def test_an_axis_of_nothing():
    assert nice_top(0) == nice_top(-1) == 1


def test_figures():
    assert [short_number(v) for v in (0.523, 9.13, 84.4, 790, 2082, 39_400, 1.5e6)] == [
        "0.52", "9.1", "84", "790", "2.1k", "39k", "1.5M",
    ]  # fmt: skip


def test_bars():
    assert [bar(share, 4) for share in (0, 1e-9, 0.25, 0.53, 1, 7)] == [
        "    ", "▏   ", "█   ", "██▏ ", "████", "████",
    ]  # fmt: skip
