"""The places of pictures in prompts: positions, what tokens see, and where pieces end."""

import numpy as np

from engine.formats.templates.prompt_pictures import PlacedPicture, SizedPicture
from engine.runtime.lookup import Lookup
from engine.runtime.pictures import Encoding, Pictures, picture_ids


def picture(key, rows, columns):
    ids = picture_ids(key, rows * columns)
    return SizedPicture((), rows, columns, ids, key)


def test_positions_go_on_after_the_larger_side():
    pictures = Pictures([PlacedPicture(2, picture("a", 2, 3)), PlacedPicture(9, picture("b", 2, 1))])
    t, h, w, _ = pictures.positions(0, 13)
    assert t.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9]
    assert h.tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9]
    assert w.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9]
    assert pictures.positions(7, 3)[:3].tolist() == [[2, 5, 6], [3, 5, 6], [4, 5, 6]]
    cut = SizedPicture((), 0, 0, picture_ids("c", 4), "c")
    assert Pictures([PlacedPicture(1, cut)]).positions(0, 6).tolist() == [[*range(6)]] * 4


def test_positions_in_a_framed_picture_are_columns_and_rows():
    """Those of what stands around it are of texts, and the text after it leaves none out."""
    ids = picture_ids("a", 8)
    pictures = Pictures([PlacedPicture(2, SizedPicture((), 2, 2, ids, "a", framed=True))])
    assert pictures.positions(1, 11).tolist() == [
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        [1, 2, 0, 1, 2, 0, 1, 2, 9, 10, 11],
        [1, 2, 0, 0, 0, 1, 1, 1, 9, 10, 11],
        [1, 2, 0, 0, 0, 0, 0, 0, 9, 10, 11],
    ]


def test_a_picture_is_seen_as_a_whole_and_stays_in_one_piece():
    pictures = Pictures([PlacedPicture(4, picture("a", 2, 3))], whole=8)
    assert pictures.seen(2, 10).tolist() == [3, 4, 10, 10, 10, 10, 10, 10, 11, 12]
    assert pictures.end_of_piece(0, 6) == 4, "the picture does not fit any more"
    assert pictures.end_of_piece(3, 6) == 10
    assert pictures.end_of_piece(4, 6) == 10
    assert pictures.end_of_piece(0, 3) == 3
    assert Pictures(pictures.placed).end_of_piece(0, 6) == 6, "one that is seen up to a token may be cut"


def test_embeddings_of_a_piece():
    seen = picture("a", 1, 3)
    pictures = Pictures([PlacedPicture(2, seen)])
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    pictures.encodings[0] = Encoding(seen, iter(()), rows)
    assert pictures.embeddings(0, 2) is None
    assert pictures.embeddings(3, 4).tolist() == [[2, 3], [4, 5], [0, 0], [0, 0]]


def test_ids_are_negative_and_the_pixels():
    a, b = picture_ids("a", 64), picture_ids("b", 64)
    assert all(-(1 << 31) <= id < 0 for id in a)
    assert a == picture_ids("a", 64)
    assert not set(a) & set(b)


def test_nobody_guesses_a_picture():
    text = [1, 2, 3, 9, -5, -6, 7, 1, 2, 3]
    assert Lookup().guess(text, 4).tokens == (9,)
