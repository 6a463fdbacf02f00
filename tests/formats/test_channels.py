"""gpt-oss's replies, as tokens: marks are special tokens, and everything else is text."""

import re

import pytest

from engine.formats.channels import ChannelSplitter, channel_marks

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
IDS = {mark: id for id, mark in enumerate(MARKS, 100)}
TEXT = 7  # the id of any other token
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


def pieces(reply: str) -> list[tuple[str, int]]:
    """(text, id) of each token. Marks between backticks are spelled out by other tokens."""
    marks = "|".join(map(re.escape, MARKS))
    parts = re.findall(rf"`([^`]*)`|({marks})|([^<`]{{1,3}}|<)", reply)
    return [
        piece
        for spelled, mark, text in parts
        for piece in ([(c, TEXT) for c in spelled] if spelled else [(mark or text, IDS.get(mark, TEXT))])
    ]


def split(reply: str, inside: bool = False) -> tuple[str, str]:
    splitter = ChannelSplitter(channel_marks(IDS), inside=inside)
    texts = {True: "", False: ""}
    for thinking, text in [*(splitter.feed(*piece) for piece in pieces(reply)), splitter.flush()]:
        texts[thinking] += text
    return texts[True], texts[False]


@pytest.mark.parametrize(
    ("reply", "thinking", "answer"),
    [
        (f"{ANALYSIS}Hm, so.<|end|><|start|>assistant{FINAL}Yes.<|return|>", "Hm, so.", "Yes."),
        (f"{ANALYSIS}Hm.<|start|>assistant{FINAL}Yes.", "Hm.", "Yes."),  # a server may hide <|end|>
        (f"{FINAL}Yes.<|return|>", "", "Yes."),
        ("Yes, to be sure.", "", "Yes, to be sure."),
        ("to=5 is right", "", "to=5 is right"),
        (f"{ANALYSIS}Hm.<|end|>Yes.", "Hm.", "Yes."),
        ("<|message|>Yes.", "", "Yes."),
        ("<|channel|>news<|message|>Yes.<|return|>", "", "Yes."),
        (
            f"{ANALYSIS}A<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            f"<|start|>assistant{ANALYSIS}B<|end|><|start|>assistant{FINAL}Yes.<|return|>",
            "A\n\nB",
            "I look.\n\nYes.",
        ),
        (
            f"{ANALYSIS}A<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{{}}<|call|>",
            "A\n\n{}",
            "",
        ),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", "{}", ""),
        (f"{ANALYSIS}So `<|end|><|start|>assistant{FINAL}x` it is", f"So <|end|><|start|>assistant{FINAL}x it is", ""),
        (f"{FINAL}Write `{ANALYSIS}` <b> first", "", f"Write {ANALYSIS} <b> first"),
        ("`<|channel|>final` is a channel", "", "<|channel|>final is a channel"),
        (f"{ANALYSIS}Hm", "Hm", ""),  # cut at a limit
        (f"{ANALYSIS}Hm<|end|><|start|>assi", "Hm", ""),
        ("<|channel|>ana", "", ""),
        (" to", "", " to"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_the_channels_of_a_reply(reply, thinking, answer):
    assert split(reply) == (thinking, answer)


def test_a_reply_that_goes_on():
    assert split(f"m.<|end|><|start|>assistant{FINAL}Yes.", inside=True) == ("m.", "Yes.")
    assert split(" to be sure.<|return|>") == ("", " to be sure.")  # within the answer


def test_text_is_shown_token_by_token():
    splitter = ChannelSplitter(channel_marks(IDS))
    fed = [splitter.feed(*piece) for piece in pieces(f"{ANALYSIS}Hm, <|end|><|start|>assistant{FINAL}Yes!")]
    assert [text for _, text in fed if text] == ["Hm,", " ", "Yes", "!"]
    assert splitter.flush() == (False, "")


@pytest.mark.parametrize(
    ("reply", "thinking", "answer"),
    [
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>", "Hm.", "Yes."),
        (" to=user<|message|>Yes.<|eot|>", "", "Yes."),
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|><call><|eot|>", "Hm.", "<call>"),
    ],
)
def test_the_recipients_of_a_reply(reply, thinking, answer):
    marks = {100: "<|start|>", 101: "<|message|>", 102: "<|eom|>", 103: "<|eot|>"}
    ids = {mark: id for id, mark in marks.items()}
    assert channel_marks(ids) == marks
    splitter, texts = ChannelSplitter(marks, with_tools=True), {True: "", False: ""}
    for piece in re.findall(r"<\|\w+\|>|[^<]{1,3}|<", reply):
        thinks, text = splitter.feed(piece, ids.get(piece, TEXT))
        texts[thinks] += text
    assert (texts[True], texts[False]) == (thinking, answer)


def test_a_vocabulary_without_the_marks_has_no_channels():
    assert channel_marks(IDS)[100] == "<|start|>"
    assert channel_marks({"<|end|>": 1, "<|start|>": 2}) == {}


@pytest.mark.parametrize("start", [f"{ANALYSIS}A<|end|><|start|>assistant", ""])
@pytest.mark.parametrize(
    "header", ["<|channel|>commentary to=functions.f json", " to=functions.f<|channel|>commentary json"]
)
def test_a_call_of_a_tool_that_the_conversation_has(start, header):
    splitter = ChannelSplitter(channel_marks(IDS), with_tools=True)
    fed = [splitter.feed(*piece) for piece in pieces(f"{start}{header}<|message|>{{}}<|call|>")]
    assert "".join(text for thinking, text in fed if not thinking) == " to=functions.f<|message|>{}"
    assert "".join(text for thinking, text in fed if thinking) == ("A" if start else "")
