import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.thinking import (
    APERTUS,
    APRIEL,
    COHERE,
    COHERE_TEXT,
    GEMMA,
    GRANITE,
    HARMONY,
    MISTRAL,
    THINK,
    ThinkMarks,
    ThinkSplitter,
    marks_of,
)

PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "</", "\n", " ", "a", "é", "thi"])
)


def expected(text: str, inside: bool) -> tuple[str, str]:
    """(thinking, answer) of a whole reply."""
    if not inside:
        if not (opened := re.match(r"\s*<think>", text)):
            return "", text
        text = text[opened.end() :]
    thought, mark, answer = text.partition("</think>")
    return thought.lstrip("\n"), answer.lstrip("\n") if mark else ""


def collect(chunks: list[str], inside: bool = False, marks: ThinkMarks | None = THINK) -> tuple[str, str]:
    splitter, texts = ThinkSplitter(marks, inside=inside), {True: "", False: ""}
    for thinking, text in [*map(splitter.feed, chunks), splitter.flush()]:
        texts[thinking] += text
        assert not (thinking and texts[False]), "thinking after the answer began"
    return texts[True], texts[False]


@given(parts=PARTS, cuts=st.lists(st.integers(0, 60)), inside=st.booleans())
def test_any_chunking_gives_the_same_two_texts(parts, cuts, inside):
    text = "".join(parts)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    assert collect(chunks, inside) == collect(list(text), inside) == expected(text, inside)


@given(text=st.text(st.characters(exclude_characters="<")))
def test_text_without_marks_is_all_answer(text):
    assert collect(list(text), inside=False) == ("", text)


@pytest.mark.parametrize(
    "events",
    [  # (token, whether it is thinking, what of it is shown)
        [("<think>", True, ""), ("\n", True, ""), ("Hm", True, "Hm"), ("\n", True, "\n"),
         ("</think>", True, ""), ("\n\n", False, ""), ("Yes", False, "Yes"), (".", False, ".")],
        [("<", False, ""), ("think", False, ""), (">\n", True, ""), ("a <", True, "a "),
         (" b</", True, "< b"), ("think", True, ""), (">\n\nok", True, ""), ("!", False, "ok!")],
    ],
)  # fmt: skip
def test_one_event_a_token_whether_marks_are_one_token_or_several(events):
    splitter = ThinkSplitter()
    assert [(token, *splitter.feed(token)) for token, _, _ in events] == events


def test_a_prompt_that_ends_in_an_open_mark():
    assert collect(["Hm", "</think>", "\n\nok"], inside=True) == ("Hm", "ok")


@pytest.mark.parametrize("text", ["use <think> tags", "</think>", "a</think>b", "<thinking>", "<thi"])
def test_marks_elsewhere_are_text(text):
    assert collect(list(text), inside=False) == ("", text)


def test_a_reply_cut_off_in_its_thinking():
    assert collect(["<think>", "so </th"], inside=False) == ("so </th", "")


# --- other marks than <think> ---------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [None, MISTRAL, GEMMA, HARMONY])
@pytest.mark.parametrize("family", [MISTRAL, GEMMA, HARMONY])
def test_marks_of_other_families(marks, family):
    reply = family.open + "Hm" + family.close + "".join(family.begin[:1]) + "Yo"
    expected = ("Hm", "Yo") if marks in (None, family) else ("", reply)
    assert collect(list(reply), marks=marks) == collect([reply, ""], marks=marks) == expected


def test_a_reply_without_thinking_may_have_a_mark_too():
    assert collect(list("<|channel|>final<|message|>Yo"), marks=HARMONY) == ("", "Yo")
    assert collect(list("<|channel|>other<|message|>"), marks=HARMONY) == ("", "<|channel|>other<|message|>")


@given(cuts=st.lists(st.integers(0, 60)))
def test_marks_around_an_answer(cuts):
    text = "<think>Hm</think>\n\n<response>a</b></response>\n"
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    assert collect(chunks, marks=GRANITE) == ("Hm", "a</b>\n")
    assert collect(["x</response>"], marks=GRANITE) == ("", "x</response>")  # only after <response>


def test_the_marks_of_a_template():
    assert marks_of("the marker [BEGIN FINAL RESPONSE].") is APRIEL
    assert marks_of("[THINK]{{ x }}[/THINK]") is MISTRAL and marks_of("") is THINK
    assert marks_of("between <think></think>, <response></response>") is GRANITE
    # MiniMax M2
    assert marks_of("<think></think>{% if tool %}<response>{{ x }}</response>{% endif %}") is THINK
    assert marks_of("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>{{ x }}<|END_RESPONSE|>") is COHERE


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize(
    ("marks", "reply", "split"),
    [
        (COHERE, "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Yo<|END_RESPONSE|>", ("Hm", "Yo")),
        (COHERE, "<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[]", ("Hm", "<|START_ACTION|>[]")),
        (COHERE, "<|START_RESPONSE|>Yo<|END_RESPONSE|>", ("", "Yo")),
        (COHERE_TEXT, "<|START_THINKING|>Hm<|END_THINKING|><|START_TEXT|>Yo<|END_TEXT|>", ("Hm", "Yo")),
        (APERTUS, "<|inner_prefix|>Hm<|inner_suffix|>Yo", ("Hm", "Yo")),
        (
            APRIEL,
            "Here are my reasoning steps:\nHm[BEGIN FINAL RESPONSE]\nYo [END[END FINAL RESPONSE]",
            ("Hm", "Yo [END"),
        ),
        (APRIEL, "Here are my answers.", ("", "Here are my answers.")),
        (APERTUS, "<|inner_prefix|>Hm<|tools_prefix|>[", ("Hm", "<|tools_prefix|>[")),
    ],
)
def test_replies_of_a_family(marks, reply, split, n):
    assert collect([reply[i : i + n] for i in range(0, len(reply), n)], marks=marks) == split
