"""Text areas with a line of a megabyte without a break, as a pasted file of JSON may have.

With each key Textual wraps the line of the cursor word by word, and cuts all of it into rows for each of those that it
draws: 1 to 2 s for a megabyte. Here a plain line is wrapped row by row, and of a line without tabs only the row is cut
that is drawn.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from rich.containers import Lines
from rich.text import Text
from textual._wrap import compute_wrap_offsets
from textual.document import _wrapped_document
from textual.document._wrapped_document import WrappedDocument

_SHORT_CHARS = 1000  # of a line that is left to Textual
_WORD = re.compile("[^ ]* *")


class _Rows(Lines):
    """The rows of a line without tabs, for Textual: it takes one of them, and then counts the tabs in all before it."""

    _is_taken = False

    def __init__(self, line: Text, offsets: list[int]) -> None:
        super().__init__()
        self._line, self._offsets = line, [0, *offsets, len(line)]

    def __getitem__(self, index: int) -> Text:  # type: ignore[override]
        if self._is_taken:
            return _NO_TABS
        self._is_taken = True
        start, end = self._offsets[index], self._offsets[index + 1]
        row = Text(self._line.plain[start:end], self._line.style)
        for span in self._line.spans:
            row.stylize(span.style, max(0, span.start - start), max(0, span.end - start))
        return row


_NO_TABS = cast(Text, SimpleNamespace(plain=""))  # what is counted


class LongLine(Text):
    def divide(self, offsets: Iterable[int]) -> Lines:
        rows = [*offsets]
        return super().divide(rows) if "\t" in self.plain or not rows else _Rows(self, rows)


def line_of(text: str) -> Text:
    """The line of a text area: what its rows are cut from."""
    return (Text if len(text) < _SHORT_CHARS else LongLine)(text, end="", no_wrap=True)


def wrap_offsets(text: str, width: int, tab_size: int, **options: Any) -> list[int]:
    """Where rows of `width` cells begin, but the first: as Textual's `compute_wrap_offsets`."""
    is_plain = len(text) >= _SHORT_CHARS and text.isascii() and text.isprintable()
    return _plain_offsets(text, width) if is_plain else compute_wrap_offsets(text, width, tab_size, **options)


def _plain_offsets(text: str, width: int) -> list[int]:
    """A word goes with the spaces behind it. One that is longer than a row begins a row and is cut."""
    breaks, row = list[int](), 0
    while row + width < len(text):
        word = _last_word(text, row, row + width)
        if word > row:
            breaks.append(word)
            row = word
            continue
        end = _end_of_word(text, row)
        cuts = range(row + width, end, width)
        breaks += cuts
        row = cuts[-1]
    return breaks


def _last_word(text: str, row: int, limit: int) -> int:
    """Where the last word that may begin a row begins, from `row` to `limit`; `row` if there is none behind it."""
    end = limit
    while (space := text.rfind(" ", row, end)) >= 0:
        if text[space + 1] != " ":
            return space + 1
        # These spaces go on behind the limit, so the word before them does, too.
        end = row + len(text[row:space].rstrip(" "))
    return row


def _end_of_word(text: str, row: int) -> int:
    """Where the word at `row` ends, with the spaces behind it."""
    return match.end() if (match := _WORD.match(text, row)) else row


def _sections(document: WrappedDocument, line_index: int) -> list[str]:
    text, offsets = document.document[line_index], document.get_offsets(line_index)
    return [text[start:end] for start, end in pairwise((0, *offsets, len(text)))]


_wrapped_document.compute_wrap_offsets = wrap_offsets  # type: ignore[attr-defined, assignment]
WrappedDocument.get_sections = _sections  # type: ignore[method-assign, assignment]
