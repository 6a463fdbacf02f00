"""Markdown in lines: what is streamed ends as the whole does, and its cost does not grow with its length."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.thorough import THOROUGH, rarely
from widgets.markdown import stream
from widgets.markdown.parser import parser
from widgets.markdown.stream import StreamedMarkdown, decided

PARTS = {
    "fence": "```python\n" + "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(12)) + "```\n\n",
    "open fence": "~~~\n" + "a line of code\n" * 40,
    "table": "| col a | b |\n|---|--:|\n" + "".join(f"| row {i} | **{i * i}** |\n" for i in range(40)) + "\n",
    "list": "".join(f"{i}. item {i}\n   - nested `a`\n   - [x] task\n" for i in range(1, 30)) + "\n",
    "bullets": "".join(f"- item *{i}*\n\n  more of it\n" for i in range(30)) + "\n",
    "quote": "> quoted\n> twice\n> - a list\n\n",
    "poem": "Roses are red,\nViolets are blue.\n\n---\n\n",
    "heading": "# One\n\n## Two [link](http://example.org/'x')\n\n",
    "prose": "Some *words* and `code` " + "word " * 80 + "\n\n",
    "after": "The end.\n",
}


def plain(document: StreamedMarkdown, width: int = 60) -> list[str]:
    return [line.content.plain for line in document.lines(width)]


def streamed(text: str, sizes: list[int], width: int = 60) -> StreamedMarkdown:
    """The document after each of the pieces was drawn, as a reply is while it arrives."""
    document, shown, arrived = StreamedMarkdown(), 0, 0
    for i in range(len(text)):
        if arrived >= len(text):
            break
        arrived += sizes[i % len(sizes)]
        if (end := decided(text[:arrived])) > shown:
            document.append(text[shown:end])
            document.lines(width)
            shown = end
    document.append(text[shown:])
    return document


def whole(text: str) -> StreamedMarkdown:
    document = StreamedMarkdown()
    document.append(text)
    return document


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("size", [rarely(1), 7, 40, 300])
def test_a_streamed_part_ends_as_the_whole(name, size):
    text = PARTS[name] + PARTS["after"]
    assert plain(streamed(text, [size])) == plain(whole(text))


@settings(max_examples=100 if THOROUGH else 8)
@example(["fence", "table"], [23])
@given(
    st.lists(st.sampled_from(sorted(PARTS)), max_size=6), st.lists(st.integers(1, 90), min_size=1, max_size=5)
)
def test_any_document_in_any_pieces_ends_as_the_whole(names, sizes):
    text = "".join(PARTS[name] for name in names if name != "open fence") + PARTS["after"]
    assert plain(streamed(text, sizes)) == plain(whole(text))


@given(st.text(alphabet="ab \n`|-*>#1.[x]~", max_size=200), st.integers(5, 40))
def test_no_text_breaks_it_and_no_line_is_wider_than_asked(text, width):
    for document in (whole(text), streamed(text, [3], width)):
        lines = document.lines(width)
        letters = "".join(re.findall("[ab]", "".join(line.content.plain for line in lines)))
        # The words after a fence's mark and a link's address are not drawn.
        if not re.search(r"[\[`~|]", text):
            assert letters == "".join(re.findall("[ab]", text))
        if "|" not in text and "-" not in text and "*" not in text and "." not in text and ">" not in text:
            assert all(line.content.cell_length <= max(width, 3) for line in lines)


@pytest.mark.parametrize(
    "name", ["fence", "open fence", rarely("table"), "list", rarely("bullets"), "prose", rarely("poem")]
)
def test_a_piece_costs_no_more_late_than_early(name):
    """What is parsed again with each piece is the part of the last block that is not finished."""
    part = PARTS[name]
    if name in ("fence", "open fence"):
        part = "```\n" + "a line of code\n" * 2000
    elif name == "table":
        part = "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 2000
    elif name == "poem":
        part = "A line of a poem without an end,\n" * 2000
    else:
        part *= 30
    sizes = []
    parse = parser().parse
    with mock.patch.object(parser(), "parse", lambda text: sizes.append(len(text)) or parse(text)):
        document = StreamedMarkdown()
        for start in range(0, len(part), 100):
            document.append(part[start : start + 100])
    assert max(sizes) < stream.CUT_CHARS + 400
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]) + 200


@pytest.mark.parametrize("part", ["**bold**", "![", "- item, ", "# head ", "> quote ", "word ", "漢字"])
@pytest.mark.parametrize("size", [rarely(7), 300, 5000])
def test_a_line_without_end_is_cut(part, size, monkeypatch):
    monkeypatch.setattr(stream, "MOST_CHARS", 400)
    text, sizes, parse = part * (4000 // len(part)), [], parser().parse
    with mock.patch.object(parser(), "parse", lambda text: sizes.append(len(text)) or parse(text)):
        document = StreamedMarkdown()
        for start in range(0, len(text), size):
            document.append(text[start : start + size])
    assert max(sizes) <= 2 * 400
    if part in ("word ", "漢字"):
        rows = plain(document)
        assert "".join(rows).replace(" ", "") == text.replace(" ", "")
        assert "" not in rows  # between the parts of one paragraph


def test_a_wider_screen_lays_it_out_anew():
    document = streamed("".join(PARTS.values()), [50])
    assert plain(document, 30) == plain(whole("".join(PARTS.values())), 30)
    assert plain(document, 90) == plain(whole("".join(PARTS.values())), 90)


def test_wrapped_rows_are_copied_as_one_line():
    document = whole(
        "- one two three four five six seven\n\n    indented()\n\n> a quote of some words here\n"
    )
    copied = ""
    for line in document.lines(16):
        text = line.content.plain[line.decoration :]
        copied += (text.rstrip() if line.end == "\n" else text) + line.end
    assert "• one two three four five six seven\n" in copied
    assert "a quote of some words here\n" in copied


def test_a_table_without_room_is_a_list_of_fields():
    lines = plain(
        whole("| name | value | unit | place |\n|---|---|---|---|\n| mass | 12 | kg | here |\n"), 24
    )
    assert lines[:4] == ["name: mass", "value: 12", "unit: kg", "place: here"]


def test_cells_are_aligned_and_wrapped():
    text = "| left | right |\n|:---|---:|\n| " + "words " * 12 + "| 1 |\n"
    lines = plain(whole(text), 40)
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 40
    assert lines[3].endswith(" 1 │")


def test_tasks_have_boxes():
    assert plain(whole("- [ ] open\n- [x] done\n- plain\n")) == ["☐ open", "☑ done", "• plain"]


def test_marks_in_marks_without_end_are_left_out():
    """A recursion over them ended the program, and again when the chat was opened."""
    for mark in "*_":
        assert "word" in "".join(plain(whole(mark * 1000 + "word" + mark * 1000)))
    assert plain(whole("*" * 1000 + "word" + "*" * 1000 + " and *more*")) == ["word and more"]


def test_entities_cannot_bring_control_characters_back():
    text = "".join(plain(whole("a&#x202e;b&#27;[31m &#x9b;c\n\n`&#27;`\n")))
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", text)
