"""Breaks lines between words for a terminal, which would break them within words."""

import re
import shutil
from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

from app.cli.oneshot import Writer

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")
_FENCES = ("```", "~~~")
_MOST_WAITING = 1000  # characters of a word; more are written before it ends
_AS_THEY_ARE = (*_FENCES, "|")
"""Lines that begin so, and lines between fences, are code and tables: they are not broken."""


class WordWrap:
    """A stream of text. A word is written when it has ended, so the last one waits for the end of its line. Between two
    wide characters, as in Chinese, a line may be broken, too."""

    def __init__(self, out: Writer, columns: Callable[[], int] | None = None) -> None:
        """`columns` gives the width of the terminal, in cells (None: asks it)."""
        self._out, self._columns = out, columns or (lambda: shutil.get_terminal_size().columns)
        self._begin = ""  # of the line of the text, as far as it tells whether the line is code or a table
        self._column = 0  # cells that are in use in the line of the terminal
        self._space, self._word = "", ""  # what is not written yet
        self._is_in_word = False  # whether the beginning of the word is written: it is longer than a line
        self._is_fenced = False

    def write(self, text: str) -> None:
        for piece in _PIECES.findall(text):
            if piece == "\n":
                self._end_line()
            elif piece.isspace():
                self._end_word()
                self._space += piece
            else:
                for character in piece:
                    if get_cwidth(character) > 1:
                        self._end_word()
                    self._word += character
                if len(self._word) > _MOST_WAITING:
                    self._end_word()
                    self._is_in_word = True

    def flush(self) -> None:
        self._out.flush()

    def _end_word(self) -> None:
        """Writes the word, in the next line of the terminal if there is no room in this one."""
        if self._word:
            text = self._space + self._word
            if len(self._begin) < len(_FENCES[0]):
                self._begin = f"{self._begin}{text}".lstrip()[: len(_FENCES[0])]
            width = get_cwidth(text)
            is_raw = self._is_fenced or self._is_in_word or self._begin.startswith(_AS_THEY_ARE)
            if self._column and not is_raw and self._column + width > self._columns():
                self._out.write("\n")
                self._column, text = 0, self._word
            self._out.write(text)
            self._column += get_cwidth(text)
            self._space = self._word = ""
        self._is_in_word = False

    def _end_line(self) -> None:
        self._end_word()
        fits = self._column + get_cwidth(self._space) <= self._columns()  # else it would be an empty line
        self._out.write(f"{self._space if fits else ''}\n")
        if self._begin.startswith(_FENCES):
            self._is_fenced = not self._is_fenced
        self._begin, self._column, self._space = "", 0, ""
