"""What the screen says of an engine, from its events."""

from msgspec.structs import replace

from app.chat.status import StatusObserver
from app.cli.progress import describe
from engine.protocol.events import Loading, Prefilling, Search, Warming
from tests.app.fake_engine import READY
from widgets.chat.activity_line import status_text


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def searching(done, cached, left_s):
    search = Search(
        what="o Q6_K 2048x2048",
        choice="",
        tried=3,
        total=9,
        refused=0,
        before_us=1.0,
        after_us=1.0,
        left_s=left_s,
    )
    return Warming(done=done, total=5, cached=cached, search=search)


def test_a_search_says_what_was_known_how_far_it_is_and_how_long_it_may_take():
    clock = Clock()
    status = StatusObserver(clock)
    status.observe(Warming(done=3, total=3))
    status.observe(searching(1, 1, 20.0))
    clock.now = 6.0
    said = status_text(status.snapshot())
    assert said == "searching · o Q6_K 2048x2048 · 1 of 5 products · 1 from the cache · at most 14 s left"
    status.observe(Warming(done=1, total=83, cached=1))  # then the steps are compiled
    clock.now = 8.0
    assert status_text(status.snapshot()).startswith("preparing kernels · 1 of 83 · 1 from the cache")


def test_what_the_context_costs_is_said_while_the_model_loads():
    loading = Loading(done_bytes=0, total_bytes=10**9, context_length=40_960, cache_bytes=4_700_000_000)
    status = StatusObserver(Clock())
    status.observe(loading)
    cost = "context of 40,960 tokens: 4.70 GB of KV cache"
    assert status_text(status.snapshot()) == f"loading · 0 B of 1.00 GB · 0% · {cost}"
    status.observe(replace(loading, kv="q8_0", cache_bytes=2_500_000_000))
    assert status_text(status.snapshot()).endswith("2.50 GB of KV cache in q8_0")
    assert describe(loading) == "loading 0%, context of 40,960 tokens (4.70 GB of KV cache)"


def test_the_memory_of_states_is_what_the_engine_says():
    status = StatusObserver(Clock())
    status.observe(replace(READY, state_bytes=100, states_bytes=1_000, checkpoints=8))  # two states, on a GPU
    ready = status.snapshot().ready
    assert (ready.states_bytes, ready.checkpoints) == (1_000, 8)


def test_no_time_is_left_where_all_is_done_but_the_end():
    clock = Clock()
    status = StatusObserver(clock)
    for done, now in ((0, 0.0), (6, 3.0), (12, 6.0)):
        clock.now = now
        status.observe(Warming(done=done, total=12))
        clock.now += 0.1
    assert status_text(status.snapshot()) == "preparing kernels · 12 of 12"


def test_how_long_kernels_take_that_are_searched_one_by_one():
    """As tinygrad's search goes: each takes its own time, and more become known."""
    clock = Clock()
    status = StatusObserver(clock)

    def left(now, done=None, total=20):
        clock.now = now
        if done is not None:
            status.observe(Warming(done=done, total=total))
        return status.snapshot().seconds_left

    left(0.0, 0)
    assert [left(2.0 * done, done) for done in (1, 2, 3)] == [None] * 3, "too few to tell"
    assert left(8.0, 4) == 32.0
    assert (left(9.0), left(10.0), left(15.0), left(40.0)) == (31.0, 30.0, 30.0, 30.0), "one takes long"
    assert left(40.0, 5) == 8.0 * 15
    assert left(40.0, 5, total=25) == 8.0 * 20, "more are known"
    assert left(40.0, 25, total=25) is None


def test_how_long_a_prompt_takes_is_told_between_its_chunks_too():
    clock = Clock()
    status = StatusObserver(clock)
    for done in (100, 600, 1100):
        status.observe(Prefilling(request_id=1, done=done, total=1600, cached=100))
        clock.now += 5.0
    assert status.snapshot().seconds_left is None
    clock.now -= 3.0
    assert status.snapshot().seconds_left == 3.0


def test_kernels_after_a_search_are_not_judged_by_those_before_it():
    clock = Clock()
    status = StatusObserver(clock)
    status.observe(Warming(done=40, total=40))
    status.observe(searching(5, 1, 20.0))
    clock.now = 30.0
    for done in range(40, 46):
        status.observe(Warming(done=done, total=60))
        clock.now += 1.0
    assert status.snapshot().seconds_left == 14.0
