"""PLaMo's tokenizer, which takes the tokens with the best scores."""

import pytest

from engine.errors import ModelFileError
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tokens.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN
from tests.formats.vocabularies import write

SPECIAL = [("<unk>", UNKNOWN), ("<bos>", CONTROL), ("<eos>", CONTROL)]
SCORES = {
    "a": -3.0,
    "b": -3.0,
    "ab": -5.0,
    "abc": -9.0,
    "c": -4.0,
    "bc": -6.0,
    " ab": -4.0,
    " ": -1.0,
    "日本": -2.0,
    "x": -3e3,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokens = [
        *SPECIAL,
        *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
        *((text, NORMAL) for text in SCORES),
    ]
    scores = [0.0] * (len(tokens) - len(SCORES)) + [*SCORES.values()]
    return Tokenizer(write(tmp_path_factory.mktemp("model") / "v.gguf", "plamo2", tokens, scores=scores))


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("abc", ["abc"]),  # as good as "ab" and "c", and "a" and "bc", and longer
        ("ab ab", ["ab", " ab"]),
        ("bcab", ["bc", "ab"]),
        ("日本 a", ["日本", " ", "a"]),
        ("\ufeffab", ["ab"]),
        ("", []),
    ],
)
def test_the_best_tokens_are_taken(tokenizer, text, pieces):
    ids = tokenizer.encode(text)
    assert [tokenizer.text(id) for id in ids] == pieces
    assert tokenizer.decode(ids) == text.removeprefix("\ufeff") and not tokenizer.warning


def test_characters_without_a_token_are_bytes(tokenizer):
    ids = tokenizer.encode("xé<eos>", special=True)  # the token of x has too low a score
    assert ids[-1] == tokenizer.eos_id == 2 and tokenizer.bos_id == 1
    assert [tokenizer.text(id) for id in ids[:-1]] == ["<0x78>", "<0xC3>", "<0xA9>"]


def test_bytes_that_are_missing(tmp_path):
    with pytest.raises(ModelFileError, match="0 of 256 bytes"):
        Tokenizer(write(tmp_path / "v.gguf", "plamo2", [("a", NORMAL)], scores=[0.0]))
