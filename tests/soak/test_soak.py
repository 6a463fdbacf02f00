"""A few tries of the parts of the soak, which `make soak` runs for long; a search takes too long for a test."""

import pytest

from tests.soak.__main__ import PARTS
from tests.thorough import rarely

FEW = {
    "files": 150,
    "pictures": 60,
    "history": 15,
    "hub": 40,
    "engine": 3,
    "program": 1,
    "screen": 6,
    "switch": 2,
    "served": 1,
    "suspension": 2,
    "request": 6,
    "protocol": 300,
    "models": 60,
    "attack": 40,
}

RARE = {"files", "hub", "request", "history", "protocol", "suspension", "served", "screen"}
"""Of faults that have tests of their own."""


@pytest.mark.parametrize("part", [rarely(part) if part in RARE else part for part in FEW])
@pytest.mark.usefixtures("forked_engines")
def test_nothing_is_lost(part):
    run, _ = PARTS[part]
    counts = run(FEW[part], 1)
    for what in [what for what in counts.lost if part == "protocol" and " took over " in what]:
        del counts.lost[what]  # a request that was answered, on a busy machine
    assert counts.tries == FEW[part], counts.row()
    slow = {what for what in counts.lost if part == "program" and "ms of text" in what}  # tests time nothing
    assert counts.lost.keys() - slow == set(), counts.row()
