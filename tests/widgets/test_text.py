import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from widgets.text import as_bytes, as_count, as_duration, as_latency, clean, counted, one_line


def test_control_sequences_are_gone_and_their_text_stays():
    assert clean("a\x1b[31mb\x1b]52;c;x\x07c\x9b2Jd\x7f\r\n\te") == "a[31mb]52;c;xc2Jd\n\te"


def test_bidirectional_overrides_are_gone():
    assert clean("\u202egpj.exe\u2066\u2069\u200f") == "gpj.exe\u200f", "marks that Hebrew needs stay"


@given(st.text(alphabet=st.characters(), max_size=200))
def test_nothing_harmful_is_left(text):
    cleaned = clean(text)
    cleaned.encode("utf-8")
    for character in cleaned:
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    assert clean(cleaned) == cleaned


@given(st.text(max_size=50), st.text(max_size=50))
def test_the_parts_of_a_stream_are_cleaned_as_the_whole(left, right):
    assert clean(left) + clean(right) == clean(left + right)


def test_one_line():
    assert one_line(" a\n\tb\x1b  c ") == "a b c"


def test_figures():
    assert [as_bytes(n) for n in (0, 999, 1000, 1234567, 636_000_000, 12_345_678_901, 999_999)] == [
        "0 B", "999 B", "1.00 kB", "1.23 MB", "636 MB", "12.3 GB", "1.00 MB",
    ]  # fmt: skip
    assert [as_count(n) for n in (134_515_008, 751_632_384, 8_030_261_312)] == ["135M", "752M", "8.03B"]
    assert [as_duration(s) for s in (0.0, 0.214, 3.16, 9.96, 42.4, 59.7, 200, 720)] == [
        "0.00 s", "0.21 s", "3.2 s", "10 s", "42 s", "1 min", "3 min 20 s", "12 min",
    ]  # fmt: skip
    assert [as_latency(s) for s in (0.00031, 0.0021, 0.00996, 0.2143, 0.9996, 3.16)] == [
        "0.3 ms", "2.1 ms", "10 ms", "214 ms", "1.0 s", "3.2 s",
    ]  # fmt: skip


def test_one_is_no_plural():
    assert [counted(n, "token") for n in (0, 1, 2, 1234)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1,234 tokens",
    ]
