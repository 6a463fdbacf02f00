"""Which of the drawn characters are tinted."""

from textual.content import Content

from widgets.chat.guess_tint import GUESSED, tinted
from widgets.chat.turn import Turn
from widgets.chat.turn_lines import TurnLines
from widgets.markdown.lines import Line
from widgets.markdown.stream import StreamedMarkdown


def marked(lines):
    """What is tinted in each line."""
    return [
        [line.content.plain[span.start : span.end] for span in line.content.spans if span.style == GUESSED]
        for line in lines
    ]


def drawn(text, width=80):
    markdown = StreamedMarkdown()
    markdown.append(text)
    return markdown.lines(width)


def parts_of(text, *parts):
    return [(text.index(part), text.index(part) + len(part)) for part in parts]


def test_words_between_marks():
    text = "Some **bold and** plain words.\n\n- one item\n- another `code` item\n"
    lines = tinted(drawn(text), text, parts_of(text, "bold", " and", "words", "item\n- another"))
    assert marked(lines) == [["bold and", "words"], [], ["item"], ["another"], []][: len(lines)]
    assert [line.content.plain for line in lines] == [line.content.plain for line in drawn(text)]


def test_rows_that_are_wrapped():
    text = "alpha beta gamma delta"
    lines = tinted(drawn(text, 11), text, parts_of(text, "beta gamma"))
    assert [part for row in marked(lines) for part in row] == ["beta", "gamma"]


def test_nothing_guessed_changes_nothing():
    lines = [Line(Content("as it was"))]
    assert tinted(lines, "as it was", []) == lines


def test_a_reply_is_tinted_only_if_that_is_wanted():
    turn = Turn("assistant")
    turn.add("one ")
    turn.add("two", guessed=True)
    lines = TurnLines(turn, 0)
    lines.lay_out(40)
    assert marked(lines.lines)[0] == []
    lines.is_tinted = True
    assert not lines.is_laid_out(40)
    lines.lay_out(40)
    assert marked(lines.lines)[0] == ["two"]
