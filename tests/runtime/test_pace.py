"""The lengths of pieces of prompts, for devices that exist only as times."""

import random
import statistics

import pytest

from engine.runtime.pace import STEP_EVERY, Pace


def rounds(pace, step_s, piece_s, n=600):
    """Runs rounds while prompts keep coming; returns (tokens of the piece, seconds of the round) of each."""
    done = []
    for _ in range(n):
        tokens = pace.piece()
        done.append((tokens, step_s + (piece_s(tokens) if tokens else 0.0)))
        pace.measured(*done[-1])
    return done


@pytest.mark.parametrize(
    ("step_s", "fixed_s", "token_s", "chosen"),
    [
        (0.0067, 0.003, 30e-6, 128),  # a large model, 32 replies
        (0.0067, 0.005, 2e-6, 512),  # what a piece costs hardly depends on its length
        (0.0005, 0.0010, 1e-7, 512),  # no piece is short enough: what is nearly free goes along
        (0.0005, 0.0010, 20e-6, 64),
        (0.2, 0.05, 3e-3, 64),
    ],
)
def test_the_longest_piece_that_takes_about_as_long_as_a_step(step_s, fixed_s, token_s, chosen):
    done = rounds(Pace((64, 128, 256, 512), 512), step_s, lambda n: fixed_s + n * token_s)
    settled = [n for n, _ in done[50:] if n]
    assert statistics.mode(settled) == chosen
    assert sum(n > chosen for n in settled) <= 2  # tried again now and then
    assert all(0 in [n for n, _ in done[i : i + STEP_EVERY + 2]] for i in range(len(done) - STEP_EVERY - 2))


def test_it_follows_the_device_and_ignores_single_delays():
    draw, pace = random.Random(1), Pace((1,), 512)
    delayed = lambda n: (3 if draw.random() < 0.05 else 1) * n * 1e-3
    assert statistics.mode([n for n, _ in rounds(pace, 0.03, delayed)]) == 32
    assert statistics.mode([n for n, _ in rounds(pace, 0.12, delayed, 2000)[-500:]]) == 128
    assert statistics.mode([n for n, _ in rounds(pace, 0.008, delayed)[50:]]) == 16


def test_a_short_context_has_short_chunks():
    assert rounds(Pace((64,), 40), 0.01, lambda n: 0.001, 5)[-1][0] == 40
