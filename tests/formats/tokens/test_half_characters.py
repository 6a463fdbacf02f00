import json

from hypothesis import given
from hypothesis import strategies as st

from engine.formats.tokens import half_characters
from engine.formats.tokens.half_characters import without_half_characters


@given(st.text(st.sampled_from('\ud83d\ude00\udbff\udc00\\"nu8d\n😀'), max_size=12))
def test_half_characters_are_replaced_and_nothing_else(text):
    whole = json.loads(without_half_characters(json.dumps(text).encode()))
    assert whole == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_long_json_stays(monkeypatch):
    monkeypatch.setattr(half_characters, "MOST_BYTES", 7)
    assert without_half_characters(b'"\\ud83d"') == b'"\\ud83d"'
