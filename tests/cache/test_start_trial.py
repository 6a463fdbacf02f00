"""Results of searches that are used once a start has ended well with them. A new `StartTrials` is a new process."""

import pytest

from engine.cache.disk_cache import DiskCache
from engine.cache.start_trial import MAX_STARTS, StartTrials
from engine.errors import ModelFileError


@pytest.fixture
def cache(tmp_path):
    cache = DiskCache(tmp_path, "")
    StartTrials().begin(cache, "found")
    return cache


def fails(starts, error):
    """Whether a start that fails begins anew."""
    restarts = []
    with pytest.raises(type(error)), starts.start(lambda: restarts.append("anew")):
        raise error
    return bool(restarts)


def test_what_started_well_in_a_fresh_process_is_proved(cache):
    starts = StartTrials()
    assert starts.may_use(cache, "found") and starts.may_use(cache, "found")
    starts.proved()
    for _ in range(MAX_STARTS + 1):
        starts = StartTrials()
        assert starts.may_use(cache, "found")
        assert not fails(starts, AssertionError())  # this has nothing to do with it


def test_the_process_that_found_it_proves_nothing(tmp_path):
    cache, own = DiskCache(tmp_path, ""), StartTrials()
    own.begin(cache, "found")
    assert own.may_use(cache, "found")
    own.proved()
    starts = StartTrials()
    assert starts.may_use(cache, "found") and fails(starts, AssertionError())


def test_what_made_a_start_fail_is_not_used_again(cache):
    starts = StartTrials()
    assert starts.may_use(cache, "found") and fails(starts, AssertionError())
    later = StartTrials()
    assert not later.may_use(cache, "found") and later.dropped == 1


def test_starts_that_do_not_end_count(cache):
    for _ in range(MAX_STARTS):
        assert StartTrials().may_use(cache, "found")
    assert not StartTrials().may_use(cache, "found")


def test_a_start_that_failed_says_why_where_another_has_proved_the_result_meanwhile(cache):
    starts, others = StartTrials(), StartTrials()
    assert starts.may_use(cache, "found") and others.may_use(cache, "found")
    others.proved()
    assert not fails(starts, ModelFileError("No room."))


def test_a_start_that_failed_for_another_reason_does_not_count(cache):
    for _ in range(MAX_STARTS + 1):
        starts = StartTrials()
        assert starts.may_use(cache, "found")
        assert not fails(starts, ModelFileError("The file is damaged."))
