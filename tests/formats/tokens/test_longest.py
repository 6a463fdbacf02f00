"""RWKV's tokenizer, which takes the longest token at each place."""

import pytest

from engine.formats.tokens.longest import MOST, LongestTokens, unescaped
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tokens.vocabulary import CONTROL, NORMAL
from tests.formats.vocabularies import write

WORDS = [
    b" the",
    b" of",
    b" of the",
    b"\n\n",
    b"it's",
    b"'\"",
    b"\\n",
    "日".encode(),
    "日本".encode()[:5],
    b"  ",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pieces = [*(bytes([byte]) for byte in range(256)), *WORDS]
    tokens = [("<s>", CONTROL), *((repr(piece)[2:-1], NORMAL) for piece in pieces), ("[PAD]", 5)]
    return Tokenizer(write(tmp_path_factory.mktemp("model") / "v.gguf", "rwkv", tokens))


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("end of the\n\n\nit's", [b"e", b"n", b"d", b" of the", b"\n\n", b"\n", b"it's"]),
        ("'\"\\n\n", [b"'\"", b"\\n", b"\n"]),
        ("日本", ["日本".encode()[:5], "本".encode()[2:]]),
        ("   <s>[PAD]", [b"  ", b" ", *(bytes([byte]) for byte in b"<s>[PAD]")]),
        ("\0\x7f", [b"\0", b"\x7f"]),
        ("", []),
    ],
)
def test_the_longest_token_is_taken(tokenizer, text, pieces):
    ids = tokenizer.encode(text)
    assert [tokenizer.piece(id) for id in ids] == pieces and tokenizer.decode(ids) == text
    assert not tokenizer.warning and not tokenizer.merge.warning


def test_special_tokens_and_bounds(tokenizer):
    assert tokenizer.encode("<s> of", special=True) == [0, 257 + WORDS.index(b" of")]
    tokenizer.check_fewest(["word " * 100], 10)  # whose tokens may be long


def test_tokens_beyond_all_texts_take_no_time():
    ids = {b"a" * n + b"b": n for n in range(1, 5000)} | {b"a": 0, b"a" * (MOST + 1): 5001}
    assert LongestTokens(ids)(["a" * 400 + "b"]) == [[0] * (401 - MOST) + [MOST - 1]]


@pytest.mark.parametrize("spelled", [rb"\x", rb"\xzz", rb"\xff\\x41\\\x41", b"\\", rb"\q\'"])
def test_any_spelling_has_bytes(spelled):
    known = {rb"\xff\\x41\\\x41": b"\xff\\x41\\A", rb"\q\'": b"q'"}
    assert unescaped(spelled) == known.get(spelled, unescaped(spelled))
