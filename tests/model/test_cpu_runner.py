"""The CPU runner against the float32 reference. `lower/test_cpu.py` has every architecture."""

import numpy as np
import pytest

from engine.formats.kv_format import KVFormat
from engine.kernels.cpu.rope import rotate
from engine.kernels.cpu.thread_pool import default_pool
from engine.model.cpu_runner import CPURunner
from engine.model.graph_runner import GraphRunner
from engine.model.lower.cpu import CPUModel
from engine.model.lower.cpu_step import step_kernels
from tests import generated_model
from tests.model.lower.layers import opened, written
from tests.reference import Reference, divergence


@pytest.mark.parametrize(
    "name", ["llama F32 untied, rope factors", "phi3 Q8_0, 12 of 16 rotated", "gemma4 F32, rope factors"]
)
def test_prefill_and_decode_agree_with_float32(name, tmp_path, monkeypatch):
    # Kernels of half the size: less to compile.
    monkeypatch.setattr("engine.model.cpu_runner.register_lanes", lambda: 8)
    path = written(name, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 256, 40).tolist()
    wanted = Reference(path).logits(tokens)
    runner = CPURunner(opened(path), 64)
    runner.prefill(tokens[:32], 0)  # tiles, and one that is filled up
    runner.prefill(tokens[32:36], 32)
    for position in range(36, 40):
        best = runner.decode(tokens[position], position)
        logits = runner.logits()
        assert best == logits.argmax()
        assert divergence(wanted[position], logits) < 1e-5


def test_a_prompt_runs_what_later_tokens_need(tmp_path):
    """No attention of the last layer that stores keys, and nothing of layers that only read the caches of others."""
    weights = opened(written("gemma4 F32, rope factors", tmp_path))
    stores = [sublayer.mix in weights.spec.caching for sublayer in weights.spec.sublayers]
    assert stores[-1 - stores[::-1].index(True) :].count(False) > 3
    model = CPUModel(weights, 64, default_pool(), 8, keep_packed=False)
    prefill, whole = (step_kernels(model, 8, whole=whole).kernels for whole in (False, True))
    assert prefill == whole[: len(prefill)] and prefill[-1][0] is rotate(
        model.layers[weights.spec.last_keeping].mix.heads, 8
    )


def test_long_context(tmp_path):
    """A chunk and more, so that attention spans several, and decode at depth."""
    path = generated_model.write(tmp_path / "model.gguf", layers=2, architecture="qwen3", quant="F32")
    tokens = np.random.default_rng(2).integers(0, 256, 300).tolist()
    wanted = Reference(path).logits(tokens)
    runner = CPURunner(opened(path), 512)
    for start in range(0, 290, runner.max_chunk):
        runner.prefill(tokens[start : min(start + runner.max_chunk, 290)], start)
    for position in range(290, 300):
        runner.decode(tokens[position], position)
        assert divergence(wanted[position], runner.logits()) < 1e-5


def test_a_cache_of_integers_costs_little(tmp_path, monkeypatch):
    """Our kernels and tensor graphs store the same integers, and read them alike."""
    monkeypatch.setattr("engine.model.cpu_runner.register_lanes", lambda: 8)
    path = generated_model.write(
        tmp_path / "m.gguf", layers=2, architecture="gemma3", quant="F32", heads=2, kv_heads=1
    )
    tokens = np.random.default_rng(1).integers(0, 200, 44).tolist()
    wanted = Reference(path).logits(tokens)
    runners = [kind(opened(path), 64, kv=KVFormat.Q8_0) for kind in (CPURunner, GraphRunner)]
    for runner in runners:
        runner.prefill(tokens[:32], 0)
        runner.prefill(tokens[32:40], 32)
    for position in range(40, 44):
        ours, graphs = (runner.decode(tokens[position], position) and runner.logits() for runner in runners)
        assert 1e-8 < divergence(wanted[position], ours) < 2e-4
        assert divergence(graphs, ours) < 1e-8
