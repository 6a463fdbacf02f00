"""What a window's cache holds."""

import pytest

from engine.targets.nvidia.kernels.kv_cache import CACHE_SLACK, Heads, ring_for


def test_a_ring_has_room_for_a_window_and_a_chunk():
    assert ring_for(1024, 512) == 1536 and ring_for(100, 30) == 192


def test_a_cache_without_a_window_holds_everything():
    assert Heads(2, 1, 16, 1008 + CACHE_SLACK, None, 1.0).holds(3, 900)


@pytest.mark.parametrize("written", [1, 12, 31, 32, 33, 40, 100])
def test_a_ring_holds_what_a_query_sees_until_it_is_overwritten(written):
    heads = Heads(2, 1, 16, CACHE_SLACK + 208, None, 1.0, window=12, ring=32)
    slots: dict[int, int] = {}
    for token in range(written):
        slots[token % heads.ring] = token
    for position in range(written + 1):
        seen = range(max(0, position - heads.window + 1), position)
        assert heads.holds(position, written) == all(slots[token % heads.ring] == token for token in seen)
