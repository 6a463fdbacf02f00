"""Results of searches that are used once a start has ended well with them. A new `StartTrials` is a new process."""

from unittest.mock import Mock

import pytest

from engine.cache import disk_cache
from engine.cache.disk_cache import DiskCache
from engine.cache.start_trial import MAX_STARTS, StartTrials
from engine.errors import CompilerHangsError, DeviceHangsError, ModelFileError


@pytest.fixture
def cache(tmp_path):
    cache = DiskCache(tmp_path, "")
    StartTrials().begin(cache, "found")
    return cache


def uses(starts, cache):
    return starts.may_use(cache, "found", lambda: None)


def fails(starts, error):
    """Whether a start that fails begins anew."""
    restarts = []
    with pytest.raises(type(error)), starts.start(lambda: restarts.append("anew")):
        raise error
    return bool(restarts)


def test_what_started_well_in_a_fresh_process_is_proved(cache):
    starts = StartTrials()
    assert uses(starts, cache) and uses(starts, cache)
    starts.proved()
    for _ in range(MAX_STARTS + 1):
        starts = StartTrials()
        assert uses(starts, cache)
        assert not fails(starts, AssertionError())  # this has nothing to do with it


def test_the_process_that_found_it_proves_nothing(tmp_path):
    cache, own = DiskCache(tmp_path, ""), StartTrials()
    own.begin(cache, "found")
    assert uses(own, cache)
    own.proved()
    starts = StartTrials()
    assert uses(starts, cache) and fails(starts, AssertionError())


@pytest.mark.parametrize("error", [AssertionError(), DeviceHangsError(), CompilerHangsError("It hangs.")])
def test_what_made_a_start_fail_is_not_used_again(cache, error):
    starts = StartTrials()
    assert uses(starts, cache) and fails(starts, error)
    later, dropped = StartTrials(), []
    assert not later.may_use(cache, "found", lambda: dropped.append("found"))
    assert dropped and later.dropped == 1


def test_what_cannot_be_counted_is_not_used_but_kept(cache, monkeypatch):
    with monkeypatch.context() as full_disk:
        full_disk.setattr(disk_cache, "write_whole", Mock(side_effect=OSError))
        assert not StartTrials().may_use(DiskCache(cache._folder, ""), "found", pytest.fail)
    assert uses(StartTrials(), cache)


def test_starts_that_do_not_end_count(cache):
    for _ in range(MAX_STARTS):
        assert uses(StartTrials(), cache)
    assert not uses(StartTrials(), cache)


def test_a_start_that_failed_says_why_where_another_has_proved_the_result_meanwhile(cache):
    starts, others = StartTrials(), StartTrials()
    assert uses(starts, cache) and uses(others, cache)
    others.proved()
    assert not fails(starts, ModelFileError("No room."))


def test_a_start_that_failed_for_another_reason_does_not_count(cache):
    for _ in range(MAX_STARTS + 1):
        starts = StartTrials()
        assert uses(starts, cache)
        assert not fails(starts, ModelFileError("The file is damaged."))
