"""What is written to a terminal is only what has changed, and leaves it as if all had been written."""

from __future__ import annotations

import io
import random

import pyte
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from widgets.terminal.screen_rows import ScreenRows

WIDTH, HEIGHT = 30, 12
STYLES = [Style(color="red"), Style(bgcolor="#202020"), Style(bold=True), None]


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=WIDTH)


def strip(text: str, style: Style | None = None) -> Strip:
    return Strip([Segment(text, style)]).adjust_cell_length(WIDTH)


class Terminal:
    def __init__(self) -> None:
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self.stream = pyte.Stream(self.screen)
        self.rows, self.console = ScreenRows(), console()

    def show(self, strips: list[Strip]) -> str:
        written = self.rows.update(dict(enumerate(strips)), self.console)
        self.stream.feed(written)
        return written


def test_an_unchanged_row_is_not_written_and_of_another_only_what_differs():
    terminal = Terminal()
    assert len(terminal.show([strip(f"row {y} of many") for y in range(HEIGHT)])) > 300
    assert terminal.show([strip(f"row {y} of many") for y in range(HEIGHT)]) == ""
    written = terminal.show([strip(f"row {y} of {'some' if y == 3 else 'many'}") for y in range(HEIGHT)])
    assert 0 < len(written) < 20 and "row" not in written


def test_what_follows_joined_characters_is_written_where_it_stands():
    terminal, joined = Terminal(), "👩\u200d🚀❤\ufe0f👍🏽"
    first = terminal.show([strip(f"{joined} a")])
    assert all(f"\x1b[{column}G" in first for column in (3, 5, 7)), "terminals do not agree on their widths"
    assert terminal.show([strip(f"{joined} b")]).startswith("\x1b[1;8H")


def test_rows_that_move_up_are_scrolled_by_the_terminal():
    terminal = Terminal()
    terminal.show([strip(f"row {y} of many") for y in range(HEIGHT)])
    written = terminal.show([strip(f"row {y + 2} of many") for y in range(HEIGHT)])
    assert "\n\n" in written and len(written) < 150
    assert terminal.screen.display == [strip(f"row {y + 2} of many").text for y in range(HEIGHT)]


def test_whatever_changes_the_terminal_shows_it():
    chance = random.Random(7)
    texts = [
        "",
        "a",
        "some words here",
        "日本語 text",
        "e\u0301 accent",
        "x" * WIDTH,
        "日" * (WIDTH // 2),
        "👍 ok",
    ]
    terminal, rows = Terminal(), [strip("")] * HEIGHT
    for _ in range(300):
        if chance.random() < 0.5:
            shift = chance.randrange(1, 4)
            rows = [
                *rows[shift:],
                *(strip(chance.choice(texts), chance.choice(STYLES)) for _ in range(shift)),
            ]
        else:
            rows = list(rows)
            rows[chance.randrange(HEIGHT)] = strip(chance.choice(texts), chance.choice(STYLES))
        terminal.show(rows)
        fresh = Terminal()
        fresh.show(rows)
        assert terminal.screen.display == fresh.screen.display
        for y in range(HEIGHT):
            for x in range(WIDTH):
                ours, theirs = terminal.screen.buffer[y][x], fresh.screen.buffer[y][x]
                assert (ours.fg, ours.bg, ours.bold) == (theirs.fg, theirs.bg, theirs.bold), (x, y)
