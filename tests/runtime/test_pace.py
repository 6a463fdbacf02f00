"""The room for prompts in steps, for devices that exist only as times."""

import random
import statistics

import pytest

from engine.runtime.pace import STEP_EVERY, Pace

SIZES = (64, 128, 256, 512)


def steps(pace, step_s, sizes=SIZES, n=600):
    """Runs steps while prompts keep coming; returns (room, seconds) of each. `step_s`: seconds by the room."""
    done = []
    for _ in range(n):
        room = pace.room(sizes)
        done.append((room, step_s(room)))
        pace.measured(*done[-1])
    return done


@pytest.mark.parametrize(
    ("step_s", "token_s", "chosen"),
    [
        (0.0067, 30e-6, 128),  # a large model, 32 replies
        (0.005, 2e-6, 512),  # what a step takes hardly depends on prompts
        (0.0005, 20e-6, 64),  # no room is small enough
        (0.2, 1e-3, 128),
    ],
)
def test_the_largest_room_that_keeps_the_bound(step_s, token_s, chosen):
    done = steps(Pace(), lambda n: step_s + n * token_s)
    settled = [n for n, _ in done[50:] if n]
    assert statistics.mode(settled) == chosen
    assert sum(n > chosen for n in settled) <= 2  # tried again now and then
    assert all(0 in [n for n, _ in done[i : i + STEP_EVERY + 2]] for i in range(len(done) - STEP_EVERY - 2))


def test_another_bound():
    step_s = lambda n: 0.01 + n * 50e-6
    assert [statistics.mode([n for n, _ in steps(Pace(bound), step_s)]) for bound in (1.5, 2.5, 4)] == [
        64,
        256,
        512,
    ]


def test_what_is_nearly_free_goes_along():
    assert statistics.mode([n for n, _ in steps(Pace(), lambda n: 0.01 if n > 0 else 0.001)[20:]]) == 512


def test_it_follows_the_device_and_ignores_single_delays():
    draw, pace, sizes = random.Random(1), Pace(), (16, 32, 64, 128, 256)
    delayed = lambda alone: lambda n: (3 if draw.random() < 0.05 else 1) * (alone + n * 1e-3)
    assert statistics.mode([n for n, _ in steps(pace, delayed(0.04), sizes)]) == 32
    assert statistics.mode([n for n, _ in steps(pace, delayed(0.15), sizes, 2000)[-500:]]) == 128
    assert statistics.mode([n for n, _ in steps(pace, delayed(0.017), sizes)[50:]]) == 16


def test_other_sizes_for_other_numbers_of_replies():
    pace = Pace()
    assert steps(pace, lambda n: 0.01, SIZES)[-1][0] == 512
    assert {n for n, _ in steps(pace, lambda n: 0.01, (40,), 40)} == {0, 40}


def test_what_took_too_long_is_not_tried_again_because_replies_came():
    pace, sizes = Pace(), (32, 96, 512)
    times = {0: 0.6, 32: 1.0, 96: 1.2, 512: 8.0}
    assert 512 in {n for n, _ in steps(pace, times.__getitem__, sizes, 40)}  # once
    more = {n for n, _ in steps(pace, lambda n: times[n] + 0.5, sizes, 100)}
    assert more == {0, 32, 96}


def test_while_all_replies_wait_a_step_takes_about_as_long_as_it_may():
    pace = Pace()
    assert pace.burst(512) == 512  # nothing is known yet
    for _ in range(3):
        pace.measured(512, 0.009)
    assert pace.burst(512) == 4 * 512
    for step_s in (0.004, 0.004, 0.001, 0.001):
        pace.measured(0, step_s)
    assert pace.burst(512) == 4 * 512  # with other replies too
    for _ in range(3):
        pace.measured(256, 3.0)
    assert pace.burst(256) == 256
