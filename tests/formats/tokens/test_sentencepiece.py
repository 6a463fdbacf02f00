"""SentencePiece, whose tokens are merged by score, against its description; and its unigrams."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tokens.vocabulary import StreamDecoder
from tests.formats.tokens.test_tokenizer import no_function_scope
from tests.formats.vocabularies import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    decode,
    names,
    sentencepiece,
    write,
)

PIECES = {
    SPACE: -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "d": -5.0, "é": -6.0,
    "ab": -10.0, SPACE + "a": -11.0, "bc": -12.0, "abc": -13.0, SPACE + "abc": -14.0, "cd": -9.0,
    SPACE + SPACE: -15.0, "dd": -16.0, "dddd": -17.0,
}  # fmt: skip


def spm_reference(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's own description of BPE: join the neighbours whose join has the best score, the leftmost
    of equals, until nothing joins; spell what is no piece in bytes."""
    symbols = list(text.replace(" ", SPACE))
    while True:
        joins = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not joins:
            return [
                p for s in symbols for p in ([s] if s in pieces else [f"<0x{b:02X}>" for b in s.encode()])
            ]
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    return Tokenizer(
        sentencepiece(tmp_path_factory.mktemp("v") / "v", PIECES, special=(("[INST]", USER_DEFINED),))
    )


def test_sentencepiece_joins_the_best_score_first(spm):
    assert names(spm, "abc") == [SPACE + "abc"]  # ab, then abc, then with the space
    assert names(spm, "abcd") == [SPACE, "ab", "cd"]  # cd scores best of all
    assert names(spm, "ab", add_special=True)[0] == "<s>"


def test_sentencepiece_spells_the_unknown_in_bytes(spm):
    assert names(spm, "é€\n")[1:] == ["é", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"]
    assert decode(spm, spm.encode("é€\n😀")) == "é€\n😀"


def test_sentencepiece_space_prefix(tmp_path, spm):
    assert names(spm, " a") == [SPACE, SPACE + "a"]  # which scores better than two spaces
    assert names(spm, "[INST]a[INST] b", special=True) == [
        "[INST]",
        SPACE + "a",
        "[INST]",
        SPACE + SPACE,
        "b",
    ]
    assert names(spm, "") == []
    for text in ("a", " a", "  a", "a b", ""):
        assert decode(spm, spm.encode(text)) == text
    t = Tokenizer(sentencepiece(tmp_path / "v", PIECES, add_space_prefix=False, bos_token_id=99999))
    assert names(t, "a", add_special=True) == ["<s>", "a"]  # as without a number that is no token
    assert names(t, "a") == ["a"] and decode(t, t.encode(" a")) == " a"


def test_sentencepiece_control_and_byte_tokens_cannot_be_typed(tmp_path):
    """Not even where a vocabulary has the pieces that would lead to them."""
    pieces = {
        c: -float(i)
        for i, c in enumerate(["<", "s", ">", "/", "0", "x", "4", "1", "s>", "/s>", "0x41>", "x41>"])
    }
    t = Tokenizer(sentencepiece(tmp_path / "v", pieces | {SPACE: -50.0}))
    for text in ("<s>", "</s>", "<0x41>", "<unk>"):
        ids = t.encode(text)
        assert decode(t, ids) == text and not any(t.is_hidden(id) for id in ids)
        assert 3 + 0x41 not in ids


def test_sentencepiece_joins_characters_that_are_no_pieces(tmp_path):
    t = Tokenizer(sentencepiece(tmp_path / "v", {SPACE: -1.0, "a": -1.0, "éa": -2.0}))
    assert names(t, "éa é") == [SPACE, "éa", SPACE, "<0xC3>", "<0xA9>"]
    assert decode(t, t.encode("éa é")) == "éa é"


def test_sentencepiece_without_scores_types_or_bytes(tmp_path):
    t = Tokenizer(
        write(
            tmp_path / "v",
            "llama",
            [(c, NORMAL) for c in ("<unk>", "<s>", "</s>", SPACE, "a", "aa")],
            types=False,
        )
    )
    assert names(t, "aaa") == [SPACE, "aa", "a"] and t.eos_ids == {2} and t.bos_id == 1
    t = Tokenizer(write(tmp_path / "w", "llama", [("<unk>", 2), ("<s>", 3), (SPACE, 1), ("a", 1)]))
    assert names(t, "aé€a") == [SPACE, "a", "<unk>", "a"]


@no_function_scope
@given(text=st.text(alphabet="abcd é€", max_size=30))
def test_sentencepiece_agrees_with_its_description(spm, text):
    expected = spm_reference(PIECES, " " + text) if text else []
    assert names(spm, text) == expected
    assert decode(spm, spm.encode(text)) == text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sentencepiece_agrees_for_any_vocabulary(tmp_path, data):
    words = data.draw(st.lists(st.text(alphabet="abc", min_size=2, max_size=5), unique=True, max_size=15))
    ranks = data.draw(st.permutations(range(len(words))))
    pieces = dict.fromkeys((SPACE, "a", "b", "c"), -100.0) | {
        w: -float(r) for w, r in zip(words, ranks, strict=True)
    }
    t = Tokenizer(sentencepiece(tmp_path / "v", pieces))
    for text in data.draw(
        st.lists(st.text(alphabet="abc ", min_size=1, max_size=16), min_size=1, max_size=5)
    ):
        assert names(t, text) == spm_reference(pieces, " " + text)


def test_the_first_space_of_a_sentencepiece_reply_is_dropped(spm):
    stream = StreamDecoder(spm)
    assert [stream.feed(id) for id in [1, *spm.encode("a a")]] == ["", "a", " a"]


def test_unigrams(tmp_path):
    """The most probable tokens of a text without spaces at its ends and runs of them."""
    pieces = {"▁": -3, "▁a": -2, "b": -2, "ab": -3, "▁ab": -5.5, "c": -1}
    special = [("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
    scores = [0.0, 0.0, 0.0, *map(float, pieces.values())]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    texts = [*special, *((piece, NORMAL) for piece in pieces)]
    t = Tokenizer(write(tmp_path / "v", "t5", texts, scores=scores, **ids))
    assert names(t, "  ab   c ", add_special=True) == ["<s>", "▁a", "b", "▁", "c", "</s>"]
    assert names(t, "xx</s>c") == ["▁", "<unk>", "c"]
