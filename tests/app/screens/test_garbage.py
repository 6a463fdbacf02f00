"""Full collections of garbage wait until nothing happens."""

import gc
import weakref

import pytest

from app.screens import garbage
from tests.thorough import thorough


@pytest.fixture(autouse=True)
def stock_gc(monkeypatch):
    """Not what conftest.py puts in its place."""
    monkeypatch.setattr(garbage, "gc", gc)


class Ring:
    def __init__(self):
        self.itself = self


@pytest.fixture
def collections(monkeypatch, stock_gc):
    """The generations of the collections that were made."""
    made, thresholds = [], gc.get_threshold()
    monkeypatch.setattr(garbage, "_THRESHOLDS", (700, 10, 10))  # Python's own, and not those of our tests
    garbage.resume()
    gc.freeze()  # all that other tests have left
    note = lambda phase, info: phase == "start" and made.append(info["generation"])
    gc.callbacks.append(note)
    yield made
    gc.callbacks.remove(note)
    garbage.resume()
    gc.set_threshold(*thresholds)


def allocate(count: int) -> list[list[int]]:
    return [[i] for i in range(count)]


@thorough
def test_no_full_collection_comes_by_itself(collections):
    gc.collect()  # which counts what is left: Python makes the next one when a quarter has been added
    collections.clear()
    kept = allocate(400_000)
    assert 2 in collections, "as Python does it"
    before = gc.get_freeze_count()
    garbage.postpone()
    collections.clear()
    more = allocate(400_000)
    assert 1 in collections and 2 not in collections
    garbage.collect_if_due()
    assert 2 in collections
    assert gc.get_freeze_count() - before > len(kept) + len(more), "the next collection leaves them out"
    collections.clear()
    garbage.collect_if_due()
    assert collections == [], "nothing is due"


@thorough
def test_rings_of_a_chat_that_was_closed_are_found():
    garbage.postpone()
    try:
        ring = Ring()
        gc.freeze()
        found = []
        weakref.finalize(ring, found.append, True)
        del ring
        gc.collect()
        assert not found
        garbage.forget_survivors()
        gc.collect()
        assert found
    finally:
        garbage.resume()
