"""Drawing tokens: which can be drawn, how often, and in what way the steps combine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.events import Sampling
from engine.runtime.sampling import Sampler, log_probabilities

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def drawn(logits, previous=(), n=2000, **sampling):
    sampler = Sampler(Sampling(**({"seed": 1, "temperature": 1.0} | OFF | sampling)))
    logits = np.asarray(logits, np.float32)
    return np.bincount([sampler.sample(logits, previous) for _ in range(n)], minlength=len(logits)) / n


def test_plain_draws_follow_the_probabilities():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(drawn(np.log(p), n=20_000), p, atol=0.015)


def test_temperature_sharpens_and_flattens():
    p = np.array([0.6, 0.3, 0.1])
    for temperature in (0.5, 2.0):  # of 5000 draws the error is 0.007
        wanted = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        np.testing.assert_allclose(drawn(np.log(p), temperature=temperature, n=5000), wanted, atol=0.03)
    assert drawn(np.log(p), temperature=0)[0] == 1


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_p": 0.99}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {1, 3}),
        ({"top_k": 3, "min_p": 0.5}, {1, 3}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.5 of the 0.8 that top-k leaves is 0.625
    ],
)
def test_what_is_left_to_draw_from(sampling, allowed):
    logits = np.log([0.06, 0.5, 0.14, 0.3])
    assert set(np.flatnonzero(drawn(logits, **sampling))) == allowed


def test_repetition_penalty_makes_what_was_said_less_probable():
    logits = [1.0, 2.0, -1.0]
    sampler = Sampler(Sampling(temperature=0, repeat_penalty=3.0, repeat_last_n=2))
    assert sampler.sample(np.array(logits, np.float32), [1]) == 0  # 2 / 3 is less than 1
    assert sampler.sample(np.array(logits, np.float32), [1, 0, 0]) == 1  # 1 is too long ago
    assert sampler.sample(np.array([-1.0, -2.0], np.float32), [0]) == 1  # negative ones are multiplied
    assert not sampler.greedy and Sampler(Sampling(temperature=0)).greedy


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50),
    st.integers(0, 60),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.05, 5),
    st.integers(0, 2**32),
)
def test_any_setting_draws_a_token_that_it_allows(logits, top_k, top_p, min_p, temperature, seed):
    x = np.asarray(logits, np.float32)
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed)
    token = Sampler(sampling).sample(x, [])
    assert 0 <= token < len(x)
    if top_k > 0:
        assert np.count_nonzero(x > x[token]) < top_k
    assert min_p == 0 or x[token] >= x.max() + np.log(min_p) - 1e-5
    assert token == Sampler(sampling).sample(x, [])


def test_log_probabilities():
    p = np.array([0.1, 0.6, 0.3])
    chosen, top = log_probabilities(np.log(p).astype(np.float32), 0, 2)
    assert chosen == pytest.approx(np.log(0.1), abs=1e-6)
    assert [t.id for t in top] == [1, 2]
    assert [t.logprob for t in top] == pytest.approx(np.log([0.6, 0.3]).tolist(), abs=1e-6)
    assert len(log_probabilities(np.log(p).astype(np.float32), 0, 99)[1]) == 3


@pytest.mark.parametrize("size", [500, 32_003, 151_936])
def test_top_k_of_a_large_vocabulary(size):
    logits = np.random.default_rng(3).permutation(size).astype(np.float32)  # no two alike
    logits[-3:] = size + np.arange(3)  # in the last block, which may not be whole
    p = drawn(logits / 1e4, top_k=5, temperature=50.0, n=200)
    assert set(np.flatnonzero(p)) == set(np.argsort(-logits)[:5])


def test_additive_penalties():
    """llama.cpp's: one for having been said, and one for each time."""
    logits, said = [3.0, 2.0, 1.0], [0, 0, 1]
    draw = lambda previous, **penalties: Sampler(
        Sampling(temperature=0, repeat_last_n=3, **penalties)
    ).sample(np.array(logits, np.float32), previous)
    assert draw(said, presence_penalty=0.9) == 0 and draw(said, presence_penalty=1.5) == 0
    assert draw(said, frequency_penalty=0.7) == 0 and draw(said, frequency_penalty=1.1) == 2
    assert draw([0, 2, 2, 2], presence_penalty=-1.5) == 0 and draw([2, 1, 1], presence_penalty=-1.5) == 1
    assert draw([0, 2, 2, 2], frequency_penalty=-1.0) == 2  # the first one is too long ago
    assert not Sampler(Sampling(temperature=0, frequency_penalty=0.1)).greedy
