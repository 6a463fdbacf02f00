"""Recurrent states in the runner of tensor graphs: chunks of a prompt, checkpoints, and beginning anew."""

import numpy as np
import pytest

from engine.model.checkpoints import StateStore
from engine.model.graph_runner import GraphRunner
from tests.model.lower.layers import opened, written
from tests.reference import Reference, divergence

TOKENS = np.random.default_rng(2).integers(0, 256, 80).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written("qwen35 F32, 8 of 16 rotated", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner(path):
    return GraphRunner(opened(path), 128)


def run(runner, chunks):
    """Prefill of TOKENS in chunks from the begin; the states after them, one after the other."""
    position = 0
    for n in chunks:
        runner.prefill(TOKENS[position : position + n], position)
        position += n
    return state(runner)


def state(runner):
    return np.concatenate([t.numpy().ravel() for s in runner._transformer.states for t in s.tensors])


@pytest.mark.parametrize("size", [1, 7, 14])
def test_chunks_of_any_size_leave_the_same_state(runner, size):
    whole = run(runner, (32, 32, 6))
    np.testing.assert_allclose(run(runner, [size] * (70 // size)), whole, atol=1e-5)


def test_decode_leaves_the_state_of_prefill(runner, path):
    whole = run(runner, (32, 8))
    run(runner, (30,))
    for position in range(30, 40):
        runner.decode(TOKENS[position], position)
    np.testing.assert_allclose(state(runner), whole, atol=1e-5)
    assert divergence(Reference(path).logits(TOKENS[:40])[-1], runner.logits()) < 1e-6


def test_a_checkpoint_is_gone_back_to(runner):
    assert isinstance(runner, StateStore) and runner.state_slots > 1
    at_40 = run(runner, (32, 8))
    runner.save_state(1)
    assert 4 * state(runner).size == runner.state_bytes
    runner.prefill(TOKENS[40:60], 40)
    runner.save_state(0)
    assert np.abs(state(runner) - at_40).max() > 1e-3
    runner.load_state(1)
    assert runner.state_position() == 40
    np.testing.assert_array_equal(state(runner), at_40)
    runner.prefill(TOKENS[40:64], 40)
    after = state(runner)
    np.testing.assert_allclose(after, run(runner, (32, 32)), atol=1e-5)
