"""Hashes of the last tokens, against a loop in Python's whole numbers."""

from engine.description.spec import HashedRows
from engine.description.sublayers import Weight
from tests.reference_connections import hashed_rows

OF = HashedRows(
    table=Weight("t", 300, 32, 0),
    multipliers=(6364136223846793005, (1 << 64) - 3, 3202034522624059733),
    offsets=(0, 90, 180, 240),
    sizes=(89, 83, 61, 59),
    each=2,
    end=7,
    picture=9,
)


def test_rows_depend_on_the_last_tokens_up_to_an_end():
    text = [3, 4, 7, 5, 7, 7, 6, 250, 9, 8, 7, 1]
    whole = OF.rows([], text)
    assert whole.tolist() == [hashed_rows(OF, text[: i + 1]) for i in range(len(text))]
    for at in range(1, len(text)):
        assert OF.rows(text[:at], text[at:]).tolist() == whole[at:].tolist()
        assert OF.rows(text[:at][-OF.kept :], text[at : at + 1]).tolist() == [whole[at].tolist()]
    assert OF.rows([], [-5]).tolist() == OF.rows([], [OF.picture]).tolist()
