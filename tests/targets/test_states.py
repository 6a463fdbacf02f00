"""Recurrent states in runners: chunks of a prompt, checkpoints, beginning anew, and several sequences."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.model.memory_need import memory_need
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.cpu.runner import CPURunner
from engine.targets.graph.runner import GraphRunner
from engine.targets.nvidia.kernels.recurrent.delta_net import DeltaHeads
from engine.targets.nvidia.states import DeviceStates
from tests import generated_model
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.targets.layers import CONTEXT
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import thorough

TOKENS = np.random.default_rng(2).integers(0, 256, 80).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return generated_model.write(path, architecture="qwen35", quant="F32", layers=3, rotated=8)


@pytest.fixture(scope="module", params=[pytest.param(GraphRunner, marks=thorough), CPURunner])
def runner(path, request, plain_graphs):
    return LoneSequence(request.param(opened(path), CONTEXT))


def run(runner, chunks):
    """Prefill of TOKENS in chunks from the begin; the states after them, one after the other."""
    position = 0
    for n in chunks:
        runner.prefill(TOKENS[position : position + n], position)
        position += n
    return state(runner)


def state(lone):
    runner = lone.runner
    if isinstance(runner, CPURunner):
        return np.concatenate([states[0] for states in runner._model.states.memory])
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
    store = runner.runner
    assert store.state_slots > 1
    at_40 = run(runner, (32, 8))
    store.save_state(1)
    assert 4 * state(runner).size == store.state_bytes
    runner.prefill(TOKENS[40:60], 40)
    store.save_state(0)
    assert np.abs(state(runner) - at_40).max() > 1e-3
    store.load_state(1)
    assert store.state_position() == 40
    np.testing.assert_array_equal(state(runner), at_40)
    runner.prefill(TOKENS[40:64], 40)
    after = state(runner)
    np.testing.assert_allclose(after, run(runner, (32, 32)), atol=1e-5)


def test_sequences_side_by_side(path):
    """Rows of some of them at a time; one that begins anew; and one that goes back to a checkpoint of another."""
    weights = opened(path)
    runner, reference = CPURunner(weights, CONTEXT, parallel=3), Reference(path)
    n_states = 3 + runner.state_slots
    kept = sum(memory_need(weights.spec, 128, parallel=n).states_bytes * s for n, s in ((3, 1), (1, -1)))
    assert kept == (n_states - 9) * runner.state_bytes
    blocks = KVBlocks(runner)
    texts = [TOKENS[first : first + n] for first, n in ((0, 40), (7, 13), (30, 1))]

    def prefill(sequence: int, done: int) -> None:
        tokens = texts[sequence][done:-1]
        blocks.reserve(sequence, len(tokens))
        runner.run([Slot(sequence, tuple(tokens), done, "none")])
        blocks.commit(sequence, tokens)

    for sequence in (0, 1):
        prefill(sequence, 0)
        assert runner.state_position(sequence) == len(texts[sequence]) - 1
    runner.save_state(2, sequence=1)
    for sequences in ((0, 1, 2), (2, 0), (1,), (2, 1, 0)):
        for sequence in sequences:
            blocks.reserve(sequence, 1)
        best = runner.run([Slot(s, (texts[s][-1],), len(texts[s]) - 1) for s in sequences])
        for sequence, token, logits in zip(sequences, best, runner.logits(), strict=True):
            assert divergence(reference.logits(texts[sequence])[-1], logits) < 1e-6
            blocks.commit(sequence, texts[sequence][-1:])
            texts[sequence].append(int(token))
    blocks.cut(0, 0)
    texts[0] = texts[1][:12] + TOKENS[50:60]
    prefill(0, 0)
    whole = [states[0].copy() for states in runner._model.states.memory]
    runner.load_state(2, sequence=0)
    assert runner.state_position(0) == 12
    runner.run([Slot(0, tuple(texts[0][12:-1]), 12, "none")])
    for got, want in zip(runner._model.states.memory, whole, strict=True):
        np.testing.assert_allclose(got[0], want, atol=1e-5)


def test_a_checkpoint_on_a_gpu_leaves_and_comes_back_as_it_was():
    heads = DeltaHeads(2, 4, 16, 4, 1e-6)
    states = DeviceStates([SimpleNamespace(of=heads)] * 2)
    export = np.random.default_rng(0).normal(size=2 * heads.state_size).astype(np.float32).view(np.uint8)
    states.import_state(3, 70, export)
    np.testing.assert_array_equal(states.export_state(3), export)
    assert not states.export_state(2).any() and export.size == states.state_bytes
