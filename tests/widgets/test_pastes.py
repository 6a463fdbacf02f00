"""A pasted text stays a text, whatever is in it."""

import random

import pytest
from textual.drivers import linux_driver
from textual.events import Key, Paste, Resize

import widgets.terminal.ordered_input  # noqa: F401  puts the parser in its place
from widgets.terminal.pastes import ANSWERED

LOG = "one \x1b[31mred\x1b[0m\rtwo \x1b[A three\x1b\rfour\x1b"


def read(pieces):
    parser = linux_driver.XTermParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("size", [1000, 7, 1])
def test_escapes_in_a_paste_are_no_keys(size):
    sent = f"a\x1b[200~{LOG}\x1b[201~b\x1b[A\x1b[200~c\x1b[201~"
    events = read(sent[i : i + size] for i in range(0, len(sent), size))
    assert [e.key if isinstance(e, Key) else e.text for e in events] == [
        "a",
        LOG.replace("\x1b", ""),
        "b",
        "up",
        "c",
    ]
    assert isinstance(events[1], Paste)


def test_what_comes_at_once_is_one_text():
    sent = [
        "a",
        "[" * 4096,
        "[" * 904 + "\r",
        "\x1b[A",
        "\x1b]11;" + "y" * 500 + "\x1b\\",
        "z" * 5,
        "z" * 500,
    ]
    events = [e for e in read(sent) if isinstance(e, Key | Paste)]
    got = [e.key if isinstance(e, Key) else e.text for e in events]
    keys = ["a", "[" * 4096, "[" * 904, "enter", "up"]
    assert got[: len(keys)] == keys and got[-1] == "z" * 500


def test_what_a_terminal_is_and_can_is_not_typed():
    """Each character was a key: 5 kB of such answers kept the chat for 20 s."""
    events = read(["a\x1b[?1;2c\x1b[>41;354;0cb\x1b[?u\x1b[?31u\x1b[8;9;99t\x1b[A", "\x1b[?2026;2$y", "c"])
    assert [e.key for e in events if isinstance(e, Key)] == ["a", "b", "up", "c"] and len(events) == 5


def test_bytes_that_are_no_text_do_not_end_the_program():
    decode = linux_driver.getincrementaldecoder("utf-8")().decode
    euro = "\N{EURO SIGN}".encode()
    assert (
        decode(b"a\xe9b" + euro[:1]) + decode(euro[1:]) + decode(b"\xff", final=True)
        == "a\ufffdb\u20ac\ufffd"
    )


@pytest.mark.parametrize(
    "sequence", ["\x1b[97;1:3u", "\x1b[97:65;2u", "\x1b[1114112u", "\x1b[99999999999999999999u"]
)
def test_keys_that_textual_cannot_read_are_none(sequence):
    assert [event.key for event in read([f"{sequence}b"]) if isinstance(event, Key)] == ["b"]


def test_pieces_of_any_size_give_the_same():
    rng = random.Random(0)
    sent = f"x\x1b[200~{LOG}\x1b[201\x1b[201~\x1b[B\x1b[200~\x1b[201~y" * 3
    whole = [repr(event) for event in read([sent])]
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(sent)), 9))
        pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        assert [repr(event) for event in read(pieces)] == whole


@pytest.mark.parametrize("cut", [5, 12, 19, 24, 40])
def test_what_a_terminal_answers_is_not_typed(cut):
    sent = "a\x1bP>|kitty(0.42.1)\x1b\\b\x1b_Gi=7;OK\x1b\\c\x1b[A"
    events = [e for e in read([sent[:cut], sent[cut:]]) if isinstance(e, Key)]
    assert [e.character for e in events if e.key == ANSWERED] == [">|kitty(0.42.1)", "i=7;OK"]
    assert [e.key for e in events if e.key != ANSWERED] == ["a", "b", "c", "up"]


@pytest.mark.parametrize("begin", ["\x1b]52;c;", "\x1b_G", "\x1bP1+r"])
@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_long_answer_is_no_keys_and_one_without_an_end_takes_none(begin, size):
    sent = (begin + "A" * 100_000)[:100_000]
    pieces = lambda end: [(sent + end)[i : i + size] for i in range(0, len(sent + end), size)]
    keys = lambda end: [e.key for e in read(pieces(end)) if isinstance(e, Key)]
    assert keys("\x1b\\b") == keys("\x07b") == ["b"]
    lost = [e.key for e in read([*pieces(""), "b", "\x11"]) if isinstance(e, Key)]
    assert lost == ["b", "ctrl+q"]


def test_a_paste_whose_end_is_lost_can_be_left():
    pasted, key = [e for e in read(["\x1b[200~one", "two\x03\x11", "\x03"]) if isinstance(e, Key | Paste)]
    assert pasted.text == "onetwo\x03\x11" and key.key == "ctrl+c"


def test_a_terminal_of_any_size_is_not_believed():
    events = read(["\x1b[48;99999;99999;1;1t", "\x1b[48;40;100;1;1t"])
    assert [tuple(e.size) for e in events if isinstance(e, Resize)] == [(100, 40)]


@pytest.mark.parametrize("after", ["", "\x1b[0n", "\x1b[A"])
def test_a_key_with_alt_is_one_key_whatever_follows(after):
    keys = [event.key for event in read(["\x1bz" + after]) if isinstance(event, Key)]
    assert keys[0] == "alt+z" and "z" not in keys[1:]
    assert [e.key for e in read(["\x1bf", "\x1bOP", "\x1b\x1b[A"])][:2] == ["ctrl+right", "f1"]


def test_a_paste_without_bound_is_cut(monkeypatch):
    monkeypatch.setattr("widgets.terminal.pastes.MOST_PASTED", 10)
    [first, *keys, second] = read(
        ["\x1b[200~" + "a" * 8, "b" * 8, "\x1b" * 8 + "c" * 8 + "\x1b[201~x\x1b[200~next\x1b[201~"]
    )
    assert first.text == "a" * 8 + "bbb" and [key.key for key in keys] == ["x"] and second.text == "next"
