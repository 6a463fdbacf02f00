"""What the screen says of an engine, from its events."""

from app.status import StatusObserver
from engine.events import Search, Warming
from widgets.activity_line import describe


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
    said = describe(status.snapshot())
    assert said == "searching · o Q6_K 2048x2048 · 1 of 5 products · 1 from the cache · 14 s left"
    status.observe(Warming(done=1, total=83, cached=1))  # then the steps are compiled
    clock.now = 8.0
    assert describe(status.snapshot()).startswith("preparing kernels · 1 of 83 · 1 from the cache")


def test_no_time_is_left_where_all_is_done_but_the_end():
    clock = Clock()
    status = StatusObserver(clock)
    for done, now in ((0, 0.0), (6, 3.0), (12, 6.0)):
        clock.now = now
        status.observe(Warming(done=done, total=12))
        clock.now += 0.1
    assert describe(status.snapshot()) == "preparing kernels · 12 of 12"
