"""The CPU runner against a float32 reference, and against llama.cpp's logits where these are at hand."""

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.model.config import ModelConfig
from engine.model.cpu_runner import CPURunner
from engine.model.weights import Weights
from tests import generated_model
from tests.model.test_transformer import MODELS
from tests.reference import Reference, divergence, log_softmax


def opened(path, context=256):
    file = GGUF(path)
    return CPURunner(Weights(file, ModelConfig.from_gguf(file), lambda _: None), context)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_agree_with_float32(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "engine.model.cpu_runner.register_lanes", lambda: 8
    )  # kernels of half the size: less to compile
    path = generated_model.write(tmp_path / "model.gguf", layers=2, **MODELS[name])
    tokens = np.random.default_rng(1).integers(0, 256, 40).tolist()
    wanted = Reference(path).logits(tokens)
    runner = opened(path)
    runner.prefill(tokens[:32], 0)  # two tiles, and one that is filled up
    runner.prefill(tokens[32:36], 32)
    for position in range(36, 40):
        best = runner.decode(tokens[position], position)
        logits = runner.logits()
        assert best == logits.argmax()
        assert divergence(wanted[position], logits) < 1e-5


def test_long_context(tmp_path):
    """A chunk and more, so that attention spans several, and decode at depth."""
    path = generated_model.write(tmp_path / "model.gguf", layers=2, architecture="qwen3", quant="F32")
    tokens = np.random.default_rng(2).integers(0, 256, 300).tolist()
    wanted = Reference(path).logits(tokens)
    runner = opened(path, 512)
    for start in range(0, 290, runner.max_chunk):
        runner.prefill(tokens[start : min(start + runner.max_chunk, 290)], start)
    for position in range(290, 300):
        runner.decode(tokens[position], position)
        assert divergence(wanted[position], runner.logits()) < 1e-5


@pytest.mark.parametrize("name", ["tiny-llama-F32-0", "tiny-qwen3-Q4_K_M-0"])
def test_llama_cpps_logits(shared, make_model, tmp_path, name):
    shape, quant, _ = name.rsplit("-", 2)
    path = tmp_path / "model.gguf"
    make_model(shape, quant, path)
    oracle = np.load(shared / "oracle" / f"{name}.npz")
    tokens = oracle["tokens1"].tolist()
    runner = opened(path)
    runner.prefill(tokens[:-1], 0)
    greedy = [runner.decode(tokens[-1], len(tokens) - 1)]
    last = log_softmax(runner.logits())
    assert divergence(oracle["last_logits1"], runner.logits()) < (1e-6 if quant == "F32" else 1e-3)
    top = oracle["top16_ids1"][-1].astype(np.int64)
    if quant == "F32":
        np.testing.assert_allclose(last[top], oracle["top16_logprobs1"][-1], atol=2e-3)
    while len(greedy) < 24:
        greedy.append(runner.decode(greedy[-1], len(tokens) + len(greedy) - 1))
    if quant == "F32":
        assert greedy == oracle["greedy1"].tolist()
