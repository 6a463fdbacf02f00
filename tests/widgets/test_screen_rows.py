"""What is written to a terminal is only what has changed, and leaves it as if all had been written."""

from __future__ import annotations

import io
import random

import pyte
from rich.cells import cell_len
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
    """Terminals do not agree on their widths."""
    terminal = Terminal()
    first = terminal.show([strip("👩\u200d🚀❤\ufe0f👍🏽e\u0301 a")])
    emoji = "  \x1b[1G👩\u200d🚀\x1b[3G  \x1b[3G❤\ufe0f\x1b[5G  \x1b[5G👍🏽\x1b[7G"
    assert first.startswith(f"\x1b[1;1H{emoji}e\u0301\x1b[8G a")
    assert terminal.show([strip("👩\u200d🚀❤\ufe0f👍🏽e\u0301 b")]) == "\x1b[1;9Hb"


def test_of_styles_beside_what_has_changed_nothing_is_written():
    terminal = Terminal()
    for last in "ab":
        parts = [Segment("─", STYLES[1]), Segment("x", STYLES[2]), Segment(last), Segment("é", STYLES[0])]
        written = terminal.show([Strip(parts)])
    assert written == "\x1b[1;3Hb"


def test_a_flag_is_written_as_one():
    """Its second letter alone would be shown as that letter, not as the end of a flag."""
    terminal = Terminal()
    assert terminal.show([strip("🇫🇷🇩")]).startswith("\x1b[1;1H  \x1b[1G🇫🇷\x1b[3G🇩\x1b[4G")
    for flag in ("🇩🇪", "🇩🇰"):
        assert terminal.show([strip(f"🇫🇷{flag}")]).startswith(f"\x1b[1;3H  \x1b[3G{flag}\x1b[5G")


def test_what_joins_a_character_in_another_style_is_written_with_it():
    terminal = Terminal()
    for text, mark in (("e", "\u0301"), ("👩", "\u200d🚀"), ("日", "\u0308")):
        for joined in (mark, mark + "\u0302"):
            written = terminal.show(
                [Strip([Segment(text), Segment(f"{joined}x", STYLES[0])]).adjust_cell_length(WIDTH)]
            )
            assert written.startswith(f"\x1b[1;1H{text}\x1b[31m{joined}\x1b[0m\x1b[{cell_len(text) + 1}G")


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
