"""A long line is wrapped and cut as Textual does it."""

import random
import tracemalloc

import pytest
from rich.console import Console
from rich.text import Text
from textual._wrap import compute_wrap_offsets
from textual.document._document import Document
from textual.document._wrapped_document import WrappedDocument

from widgets.terminal import long_lines
from widgets.terminal.long_lines import line_of, wrap_offsets


@pytest.fixture
def all_long(monkeypatch):
    monkeypatch.setattr(long_lines, "_SHORT_CHARS", 0)


def test_rows_begin_where_textual_begins_them(all_long):
    chance = random.Random(3)
    for _ in range(1000):
        text = "".join(
            chance.choice(("a", "b", " ", "  ", "word ", "x" * 9)) for _ in range(chance.randrange(30))
        )
        text += chance.choice(("", "é", "\t", "日本"))  # not plain
        width = chance.randrange(1, 12)
        assert wrap_offsets(text, width, 4) == compute_wrap_offsets(text, width, 4), (text, width)


def test_of_a_long_word_no_copy_of_the_line_is_made():
    """With one for each word, a megabyte took seconds at each key."""
    text = ("x" * 999 + " ") * 200
    tracemalloc.start()
    try:
        assert len(wrap_offsets(text, 500, 4)) == 399
        assert tracemalloc.get_traced_memory()[1] < len(text) / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["one two three ", "one\ttwo three "])
@pytest.mark.parametrize("row", range(3))
def test_the_row_that_is_drawn_is_cut_as_all_are(all_long, text, row):
    long, short = line_of(text), Text(text, end="", no_wrap=True)
    for line in (long, short):
        line.stylize("bold")
        line.stylize("red", 5, 6)
        line.stylize("blue", 2, 9)
    rows, theirs = long.divide([4, 8]), short.divide([4, 8])
    ours = rows[row]
    assert ours.plain == theirs[row].plain
    console = Console()
    assert [*ours.render(console)] == [*theirs[row].render(console)]
    assert [rows[before].plain.count("\t") for before in range(row)] == [
        theirs[before].plain.count("\t") for before in range(row)
    ]
    assert [part.plain for part in long.divide([])] == [text]


def test_sections_are_the_rows():
    wrapped = WrappedDocument(Document("one two three\n\nfour"), width=5)
    assert [wrapped.get_sections(index) for index in range(3)] == wrapped.lines
