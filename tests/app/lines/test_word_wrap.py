import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from app.lines.word_wrap import WordWrap


def wrapped(*pieces, columns=20):
    out = io.StringIO()
    wrap = WordWrap(out, lambda: columns)
    for piece in pieces:
        wrap.write(piece)
    return out.getvalue()


def test_lines_are_broken_between_words_wherever_the_tokens_end():
    text = "Press Ctrl+J or Alt+Enter: a new line begins.\n"
    broken = "Press Ctrl+J or\nAlt+Enter: a new\nline begins.\n"
    assert wrapped(text) == wrapped(*text) == broken
    assert wrapped("twenty letters in it\nnext\n") == "twenty letters in it\nnext\n"


def test_a_word_longer_than_any_line_does_not_wait_for_its_end():
    assert len(wrapped("see", " ", *["abcd"] * 1000)) >= 3000
    assert wrapped("see", " ", *["abcd"] * 1000, " it\n") == f"see\n{'abcd' * 1000}\nit\n"


def test_a_word_is_written_once_it_has_ended():
    assert wrapped("Press Ctr") == "Press"
    assert wrapped("Press Ctr", "l+J ") == "Press Ctrl+J"


@pytest.mark.parametrize(
    "text",
    [
        "```\nx = [a for a in b if a is not None]\n```\n",
        "  ~~~\n    deep   indentation stays as it was\n  ~~~\n",
        "| a table | is not | broken | either |\n",
        "\n\n  indented\n",
        "Atwentyfourletterwordhere\n",
    ],
)
def test_code_tables_and_what_cannot_be_broken_stay(text):
    assert wrapped(*text) == text


def test_text_goes_on_after_code():
    assert (
        wrapped("```\nx\n```\nAfter it words are wrapped.\n") == "```\nx\n```\nAfter it words are\nwrapped.\n"
    )


def test_wide_characters_are_written_at_once_and_fit():
    assert wrapped("語" * 5) == "語" * 4
    assert wrapped("語" * 25 + "\n") == "\n".join(["語" * 10, "語" * 10, "語" * 5, ""])


@given(st.lists(st.text("ab 語é\n`|-", max_size=12)), st.integers(4, 30))
@example(["-- ", "-", " "], 4)  # a space after the last column
def test_nothing_but_line_breaks_changes(pieces, columns):
    text = "".join(pieces) + "\n"
    result = wrapped(*pieces, "\n", columns=columns)
    assert "".join(result.split()) == "".join(text.split())
    if "`" not in text and "|" not in text:
        for line in result.split("\n"):
            assert get_cwidth(line) <= columns or " " not in line.strip()
