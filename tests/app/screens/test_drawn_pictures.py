"""Pictures that the terminal draws, and what it is sent for that."""

from __future__ import annotations

import base64
import contextlib
import random
import re
import zlib
from math import inf

import pytest
from textual.events import Key

from tests.app.driver import chat
from tests.app.fake_engine import SEEING, FakeEngine, reply
from tests.app.terminal import Terminal
from tests.pictures import plain_picture
from tests.thorough import rarely, thorough
from tests.waiting import until
from widgets.terminal import terminal_pictures
from widgets.terminal.kitty_graphics import ASK_VERSION, END, knows_placeholders
from widgets.terminal.paced_output import QUESTION, TerminalKey
from widgets.terminal.terminal_pictures import KEPT, Shown, TerminalPictures

PLACEHOLDER = "\U0010eeee"
_COMMAND = re.compile(r"\x1b_G([^;\x1b]*);?([^\x1b]*)\x1b\\")


class Kitty:
    """As much of kitty as these pictures need. `says` is its name. It has `pictures`, by their ids: keys and pixels."""

    def __init__(self, app, says: str = "kitty(0.42.1)") -> None:
        self.app, self.says = app, says
        self.written: list[str] = []
        self.pictures: dict[int, tuple[dict[str, str], bytes]] = {}
        self.screen = Terminal(*app.size)
        self.has_room = True
        self.stops_after = 10**9  # parts of pictures, that are answered
        self._open: tuple[dict[str, str], str] | None = None
        app._driver.write = self.write
        app._driver._writer_thread = object()

    def write(self, text: str) -> None:
        self.written.append(text)
        self.app._thread_has_written()
        self.screen.feed(_COMMAND.sub("", text).replace(ASK_VERSION, ""))
        if ASK_VERSION in text and self.says:
            self.answer(f">|{self.says}")
        for keys, data in _COMMAND.findall(text):
            self._command(dict(pair.split("=") for pair in keys.split(",")), data)
        self.stops_after -= "\x1b_G" in text
        if text.endswith(QUESTION) and self.stops_after > 0:
            self.app.post_message(Key(TerminalKey.ANSWER, None))

    def answer(self, text: str) -> None:
        self.app.post_message(Key(TerminalKey.ANSWERED, text))

    def _command(self, keys: dict[str, str], data: str) -> None:
        if self._open:
            assert keys.keys() <= {"m", "q"}, "nothing comes between the parts of a picture"
            keys, data = self._open[0] | keys, self._open[1] + data
        self._open = None
        match keys.get("a"):
            case "q":
                self.answer(f"i={keys['i']};OK")
            case "d":
                self.pictures.pop(int(keys["i"]), None)
            case "T" if keys["m"] == "1":
                self._open = keys, data
            case "T" if data:
                with contextlib.suppress(zlib.error):  # one that was given up
                    if self.has_room:
                        self.pictures[int(keys["i"])] = keys, zlib.decompress(base64.b64decode(data))
                self.answer(f"i={keys['i']};{'OK' if self.has_room else 'ENOSPC:full'}")

    @property
    def cells(self) -> list[list[str]]:
        """The rows with parts of pictures, each cell with its colour."""
        rows = (self.screen.buffer[y] for y in range(self.screen.lines))
        parts = ([(c.data, c.fg) for x in range(100) if PLACEHOLDER in (c := row[x]).data] for row in rows)
        return [row for row in parts if row]


@pytest.fixture
def seeing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sea.png").write_bytes(plain_picture("navy"))
    return FakeEngine(reply("Blue."), reply("Still."), start=[SEEING])


async def test_a_terminal_that_says_so_draws_pictures(history, seeing):
    async with chat(seeing, history) as user:
        kitty = Kitty(user.app)
        await user.idle()
        await user.say("@sea.png What is it?")
        await user.sees("Blue.")
        await user.sees("▀" * 48)  # for all but the terminal they are half blocks, also a frame later
        await until(lambda: len(kitty.cells) == len({row[0][0][1] for row in kitty.cells}) == 16)
        assert "▀" not in "\n".join(kitty.screen.display)
        ((keys, pixels),) = kitty.pictures.values()
        assert (keys["c"], keys["r"], keys["U"], keys["f"]) == ("48", "16", "1", "24")
        assert len(pixels) == int(keys["s"]) * int(keys["v"]) * 3 and pixels[:3] == b"\x00\x00\x80"
        for row in kitty.cells:
            rows, columns, families = zip(*(text[1:] for text, _ in row), strict=True)
            assert len(set(columns)) == 48 and len(set(rows)) == len(set(families)) == 1
            assert len({colour for _, colour in row}) == 1
        await user.press("f1")
        await until(lambda: len(kitty.cells) < 16)
        await user.press("escape")
        await until(lambda: len(kitty.cells) == 16)
        assert len(kitty.pictures) == 1, "it is not sent again"
        await user.pilot.resize_terminal(40, 30)
        columns = lambda: [int(keys["c"]) for keys, _ in kitty.pictures.values()]  # maybe of a layout between
        await until(lambda: min(columns()) < 40, lambda: f"{columns()}, {user.app.pictures.is_due}")
        kitty.write(user.app.pictures.ended())
        assert not kitty.pictures, "the terminal keeps none"


async def test_a_picture_goes_in_parts_and_not_over_a_thin_line(history, seeing, monkeypatch):
    monkeypatch.setattr(terminal_pictures, "_AT_ONCE", 1)
    async with chat(seeing, history) as user:
        kitty = Kitty(user.app)
        await user.idle()
        pictures = user.app.pictures
        await until(lambda: pictures.is_on)
        monkeypatch.setattr(user.app, "_thin_until", inf)
        noise = bytes(range(256)) * 300 + random.randbytes(20_000)
        pictures.give(Shown(1, 4, 2), noise, (len(noise) // 3, 1))
        user.app.write_pictures()
        await user.pilot.pause(0.05)
        assert not any("a=T" in text for text in kitty.written)
        monkeypatch.setattr(user.app, "_thin_until", 0.0)
        kitty.stops_after = 2
        user.app.write_pictures()
        await until(lambda: any("a=T" in text for text in kitty.written))
        assert not kitty.pictures and pictures.is_due
        rest = pictures.ended()
        assert rest.startswith(END)
        kitty.write(rest)


@thorough
async def test_a_terminal_without_room_gets_no_more(history, seeing):
    async with chat(seeing, history) as user:
        kitty = Kitty(user.app)
        kitty.has_room = False
        await user.idle()
        await user.say("@sea.png What is it?")
        await user.sees("Blue.")
        await until(lambda: any("a=T" in text for text in kitty.written))
        await until(lambda: not user.app.pictures.is_on)
        await until(lambda: any("▀" * 48 in line for line in kitty.screen.display))


def test_the_oldest_makes_room():
    pictures = TerminalPictures()
    pictures.is_on = True
    for n in range(KEPT + 1):
        pictures.give(Shown(n, 1, 1), b"abc", (1, 1))
    sent = "".join(iter(pictures.due, ""))
    assert sent.count("a=T") == KEPT + 1 and sent.count("a=d") == 1
    assert len(set(re.findall(r"a=T,U=1,i=(\d+)", sent))) == KEPT + 1 - sent.count("a=d")


@pytest.mark.parametrize("says", ["", rarely("WezTerm 20240203")])
async def test_others_are_sent_nothing(history, seeing, says):
    async with chat(seeing, history) as user:
        kitty = Kitty(user.app, says)
        await user.idle()
        await user.say("@sea.png What is it?")
        await user.sees("Blue.")
        await until(lambda: any("▀" * 48 in line for line in kitty.screen.display))
        assert "\x1b_" not in "".join(kitty.written)


def test_terminals_tell_their_version():
    known = "kitty(0.28.0)", "kitty(1.0)", "ghostty 1.2.0-arch1"
    others = "kitty(0.27.1)", "tmux 3.5a", "XTerm(390)", "kitty", "mykitty(9.0)", "\x1b[31m", ""
    assert [name for name in (*known, *others) if knows_placeholders(name)] == list(known)
