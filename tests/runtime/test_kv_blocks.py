"""Blocks of the KV cache against a plain model: what each sequence sees through its tables is what it stored."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.runtime.kv_blocks import BLOCK, KVBlocks, KVGroup, PoolFullError
from tests.thorough import THOROUGH

REWIND = 20


@pytest.fixture(autouse=True)
def little_is_kept_behind_windows(monkeypatch):
    monkeypatch.setattr("engine.runtime.kv_blocks.REWIND", REWIND)


class Store:
    """Pools of blocks in dictionaries. The content of a place is the text up to its token."""

    def __init__(self, parallel, *groups):
        self.parallel, self.kv_groups = parallel, groups
        self.pools = [{} for _ in groups]
        self.assigned = [[[] for _ in groups] for _ in range(parallel)]
        self.copies = 0

    def assign(self, sequence, tables):
        self.assigned[sequence] = [list(table) for table in tables]

    def copy_block(self, group, source, target):
        pool = self.pools[group]
        for place in range(BLOCK):
            pool[target, place] = pool.get((source, place))
        self.copies += 1

    def write(self, sequence, tokens, start):
        """As a step does: stores tokens[start:]."""
        for pool, table in zip(self.pools, self.assigned[sequence], strict=True):
            for t in range(start, len(tokens)):
                pool[table[t // BLOCK], t % BLOCK] = content(tokens, t)

    def check(self, sequence, tokens):
        """The next token sees what was stored."""
        for pool, group, table in zip(self.pools, self.kv_groups, self.assigned[sequence], strict=True):
            for t in range(group.first_seen(len(tokens)), len(tokens)):
                assert pool[table[t // BLOCK], t % BLOCK] == content(tokens, t)


def content(tokens, t):
    """What a layer knows of token t depends on all tokens before it."""
    return t, hash(tuple(tokens[: t + 1]))


def store_all(blocks, store, sequence, tokens):
    """What a scheduler does with a prompt; returns how many of its tokens were cached."""
    cached = blocks.match(sequence, tokens)
    blocks.reserve(sequence, len(tokens) - cached)
    store.write(sequence, tokens, cached)
    blocks.commit(sequence, tokens[cached:])
    return cached


class Machine(RuleBasedStateMachine):
    """Sequences that grow, part, end and begin alike, in pools that are too small for all of them."""

    def __init__(self):
        super().__init__()
        self.store = Store(3, KVGroup(None, 20), KVGroup(20, 9), KVGroup(70, 12))
        self.blocks = KVBlocks(self.store)
        self.texts = {}
        self.longest = {}  # the length of each sequence before it was cut back
        self.found = {}  # how many of its tokens were found in the tree, if any

    sequences = st.integers(0, 2)
    # Few different runs, so that texts meet again.
    runs = st.lists(st.sampled_from([(1,), (2,) * 31, (3,) * 32, (3,) * 80]), max_size=4)

    @rule(sequence=sequences, runs=runs)
    def begin_or_go_on(self, sequence, runs):
        text = [*self.texts.get(sequence, ()), *(token for run in runs for token in run)]
        before = self.blocks.length(sequence)
        known = self.blocks.known(sequence, text)
        cached = self.blocks.match(sequence, text)
        assert cached == known
        assert before <= cached <= len(text)
        if cached > before:
            self.found[sequence] = cached
        counts = self.blocks.counts()
        try:
            self.blocks.reserve(sequence, len(text) - cached)
        except PoolFullError:
            assert self.blocks.counts() == counts
            text = text[:cached]
        else:
            self.store.write(sequence, text, cached)
            self.blocks.commit(sequence, text[cached:])
        self.texts[sequence] = text
        self.longest[sequence] = max(self.longest.get(sequence, 0), len(text))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), clears=st.booleans())
    def drop(self, data, clears):
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        end = self.blocks.clear if clears else self.blocks.drop
        end(sequence)
        del self.texts[sequence], self.longest[sequence]
        self.found.pop(sequence, None)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), back=st.integers(0, REWIND))
    def cut(self, data, back):
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[sequence]
        found = self.found.get(sequence, 0)
        length = max(found, len(text) - back, self.longest[sequence] - REWIND)
        try:
            self.blocks.cut(sequence, length)
        except PoolFullError:
            return
        self.texts[sequence] = text[:length]
        self.found[sequence] = found

    @invariant()
    def each_sees_what_it_stored(self):
        for sequence, text in self.texts.items():
            assert self.blocks.length(sequence) == len(text)
            self.store.check(sequence, text)

    @invariant()
    def tables_are_assigned_and_their_ends_are_held_once(self):
        for g, group in enumerate(self.store.kv_groups):
            tables = {sequence: self.blocks.tables(sequence)[g] for sequence in self.texts}
            assert all(
                table == self.store.assigned[sequence][g] or not table for sequence, table in tables.items()
            )
            used = [block for table in tables.values() for block in table if block >= 0]
            for sequence, text in self.texts.items():
                for own in tables[sequence][len(text) // BLOCK :]:
                    assert used.count(own) == 1
            free, held, cached = (
                getattr(self.blocks.counts()[g], name) for name in ("free", "held", "cached")
            )
            assert free + held + cached == group.blocks
            assert held == len(set(used))  # so none leaks


Machine.TestCase.settings = settings(
    max_examples=60 if THOROUGH else 20, stateful_step_count=20, deadline=None
)
test_any_course_of_events = Machine.TestCase


def opened(*blocks, parallel=2, window=None):
    store = Store(parallel, *(KVGroup(window if g else None, n) for g, n in enumerate(blocks)))
    return KVBlocks(store), store


def text(*runs):
    return [token for token, n in runs for _ in range(n)]


def test_a_prompt_is_computed_once_for_all_that_share_it():
    blocks, store = opened(20)
    system = text((1, 70))
    assert store_all(blocks, store, 0, system + text((2, 40))) == 0
    # The other still lives. Two full blocks are shared, the block where they part is copied.
    assert store_all(blocks, store, 1, system + text((3, 40))) == 70
    assert [c.held for c in blocks.counts()] == [2 + 2 + 2]
    assert store.copies == 1
    blocks.drop(0)
    assert store_all(blocks, store, 0, system + text((2, 35), (4, 9))) == 70 + 35
    blocks.drop(1)
    blocks.drop(0)
    assert [c.held for c in blocks.counts()] == [0]
    assert blocks.match(1, system + text((2, 39), (4, 1))) == 70 + 39


def test_what_is_no_number_is_forgotten_and_its_blocks_are_zeros():
    blocks, store = opened(20)
    shared = text((1, 64))
    store_all(blocks, store, 0, shared + text((2, 40)))
    store_all(blocks, store, 1, shared + text((3, 40)))
    own = set(blocks.tables(0)[0]) - set(blocks.tables(1)[0])
    blocks.clear(0)
    assert {block for (block, _), content in store.pools[0].items() if content is None} == own and len(
        own
    ) == 2
    assert blocks.match(0, shared + text((2, 40))) == 64  # what another has too
    blocks.drop(0)
    blocks.clear(1)
    assert blocks.match(0, shared) == 0 and blocks.counts()[0].free == 20


def test_equal_texts_side_by_side_become_one():
    blocks, store = opened(6)
    for length in (20, 40, 90):  # more than there would be room for
        for sequence in (0, 1):
            done = blocks.length(sequence)
            blocks.reserve(sequence, length - done)
            store.write(sequence, text((1, length)), done)
            blocks.commit(sequence, text((1, length - done)))
    assert blocks.tables(0)[0][:2] == blocks.tables(1)[0][:2] == store.assigned[1][0][:2]


def test_the_least_recently_used_end_of_a_text_is_thrown_out_first():
    blocks, store = opened(8)
    for first in (1, 2):
        store_all(blocks, store, 0, text((first, 96)))
        blocks.drop(0)
    blocks.match(0, text((1, 96)))  # used again
    blocks.drop(0)
    store_all(blocks, store, 1, text((3, 96)))  # takes two free blocks and one
    assert blocks.match(0, text((2, 96))) == 64
    blocks.drop(0)
    assert blocks.match(0, text((1, 96))) == 96
    with pytest.raises(PoolFullError):
        blocks.reserve(1, 96)
    blocks.drop(0)
    blocks.reserve(1, 96)


def test_a_window_is_found_again_only_where_it_is_whole():
    blocks, store = opened(40, 11, window=40)
    long = text(*((token, 32) for token in range(10)))
    assert store_all(blocks, store, 0, long[:200]) == 0
    store_all(blocks, store, 0, long)
    assert [table.count(-1) for table in blocks.tables(0)] == [0, (320 - 40 - REWIND) // BLOCK]
    blocks.drop(0)
    assert blocks.match(0, long[:300]) == 300  # its window was kept
    blocks.drop(0)
    store_all(blocks, store, 1, text((99, 128)))  # takes the room of what lay behind the windows
    blocks.drop(1)
    assert blocks.match(0, [*long[:120], 98]) == 0
    with pytest.raises(ValueError, match="no longer"):
        store_all(blocks, store, 1, long)
        blocks.cut(1, 100)


def test_what_a_window_lacks_is_not_made_up():
    blocks, store = opened(40, 6, window=40)
    long = text(*((token, 32) for token in range(6)))
    store_all(blocks, store, 0, long)
    store_all(blocks, store, 1, long[:40])  # ends in a block that the tree has, but not for the window
    blocks.drop(1)
    blocks.drop(0)
    store_all(blocks, store, 1, text((99, 64)))  # now only the last window is left
    blocks.drop(1)
    assert blocks.match(0, [*long, 98]) == 192
    blocks.drop(0)
    for again in (long, long[:64], [*long[:64], 98]):
        store_all(blocks, store, 0, again)
        store.check(0, again)
        blocks.drop(0)
