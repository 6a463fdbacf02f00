"""What of a chat is summarized when it does not fit into the context."""

import pytest

from app.chat.summary import Summarized, newest, summary_tokens
from engine.protocol.events import Message


def chat(*sizes):
    """Prompts and replies in turn, of so many characters."""
    roles = ("user", "assistant")
    return tuple(Message(role=roles[i % 2], content="x" * size) for i, size in enumerate(sizes))


@pytest.mark.parametrize(
    "sizes, share, start",
    [
        ((10, 10, 10, 10, 10, 10), 0.7, 2),
        ((10, 10, 10, 10, 10, 10), 0.5, 4),  # two would be a third, four two thirds
        ((10, 10, 10, 10), 1.0, 0),
        ((1, 1, 1, 1, 90, 90), 0.5, 4),  # at least the last prompt and its reply
        ((90,), 0.5, 0),
        ((), 0.5, 0),
    ],
)
def test_the_newest_turns_begin_with_a_prompt(sizes, share, start):
    assert newest(chat(*sizes), share) == start


def test_less_and_less_of_a_chat_is_summarized_and_the_prompt_says_so():
    whole = Summarized("Rust\x1b[2J", chat(1000, 1000, 1000, 4000))
    assert "fit" not in whole.request(8192) and "“Rust[2J”" in whole.request(8192)
    part = whole.part(0.7)
    assert part.messages == whole.messages[2:] and part.left_out == 2
    assert "The oldest 2 messages did not fit" in part.request(8192)
    cut = part.part(0.7)
    assert cut.messages[1].content == "…" + 2800 * "x" and "only the end did fit" in cut.request(8192)
    while (part := cut.part(0.7)) is not None:
        cut = part
    assert sum(len(message.content) for message in cut.messages) < 1500, "then it is given up"


def test_a_summary_takes_a_part_of_the_context():
    assert [summary_tokens(*limits) for limits in ((8192, None), (8192, 100), (0, 100), (0, None))] == [
        2048,
        100,
        100,
        None,
    ]
    whole = Summarized("x", chat(1, 1))
    words = ["at most 600 words", "at most 256 words"]
    assert all(text in whole.request(length) for text, length in zip(words, (8192, 2048), strict=True))
    assert words[0] in whole.request(0)
