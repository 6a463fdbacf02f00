"""A terminal that text is written to, and everything that the text has made of it."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pyte
from wcwidth import wcwidth

_STRING = re.compile(
    r"(?:\x1b\]|\x9d)(?P<osc>\d+);?(?P<text>[^\x07\x1b\x9c]*)|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])(?P<other>.?)"
)
_REORDERS = re.compile("[\u202a-\u202e\u2066-\u2069]")
_PLAIN = pyte.screens.Char(" ")


def shown(text: str) -> str:
    """`text` as cells of a terminal hold it: composed, without characters that have no width and combine with none."""
    has_cells = (char for char in text if char in "\n\t" or wcwidth(char) > 0 or unicodedata.combining(char))
    return unicodedata.normalize("NFC", "".join(has_cells))


class Terminal(pyte.Screen):
    """pyte's VT100, which also notes what pyte leaves out: commands to the clipboard and the like, what a terminal
    would type in answer to a question, the bell, and marks that reorder text."""

    def __init__(self, columns: int = 200, lines: int = 50) -> None:
        self.commands: list[str] = []
        self.typed: list[str] = []
        self.bells = 0
        self.reordering: list[str] = []
        super().__init__(columns, lines)
        self._stream = pyte.Stream(self)

    @classmethod
    def showing(cls, printed: str, **size: int) -> Terminal:
        """A terminal to which a program has printed; the kernel makes CR LF of LF."""
        terminal = cls(**size)
        terminal.feed(printed.replace("\n", "\r\n"))
        return terminal

    def draw(self, data: str) -> None:
        super().draw(shown(data))  # pyte drops what follows a character without width

    def feed(self, data: str) -> None:
        for string in _STRING.finditer(data):
            if string["osc"] not in ("0", "1", "2"):  # titles: pyte knows them
                self.commands.append(string[0])
        self.reordering += _REORDERS.findall(data)
        self._stream.feed(data)

    def text(self) -> list[str]:
        """The lines that are not empty at the end."""
        return "\n".join(line.rstrip() for line in self.display).rstrip().split("\n")

    def looks(self) -> set[Any]:
        """The colours and styles of all cells."""
        return {char._replace(data=" ") for row in self.buffer.values() for char in row.values()}

    def effects(self) -> dict[str, Any]:
        """What the text has done to the terminal, apart from text and its looks. Empty: nothing."""
        found = {
            "title": self.title,
            "icon": self.icon_name,
            "commands": self.commands,
            "typed": self.typed,
            "bells": self.bells,
            "reordering": self.reordering,
            "modes": self.mode ^ {pyte.modes.DECAWM, pyte.modes.DECTCEM},
            "hidden cursor": self.cursor.hidden,
            "charset": self.charset,
            "margins": self.margins,
            "looks of what comes next": self.cursor.attrs if self.cursor.attrs != _PLAIN else None,
        }
        return {what: value for what, value in found.items() if value}

    def bell(self, *args: Any) -> None:
        self.bells += 1

    def write_process_input(self, data: str) -> None:
        self.typed.append(data)
