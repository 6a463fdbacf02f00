"""A pasted text stays a text, whatever is in it."""

import random

import pytest
from textual.drivers import linux_driver
from textual.events import Key, Paste

import widgets.ordered_input  # noqa: F401  puts the parser in its place

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
