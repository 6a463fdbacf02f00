"""The CPU's own steps against a float32 reference, and against llama.cpp's logits where these are at hand."""

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.model.config import ModelConfig
from engine.model.cpu_steps import CoreSteps
from engine.model.weights import Weights
from tests import generated_model
from tests.model.test_transformer import MODELS
from tests.reference import Reference, divergence, log_softmax


def opened(path, context=256):
    file = GGUF(path)
    return CoreSteps(Weights(file, ModelConfig.from_gguf(file), lambda _: None), context)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_agree_with_float32(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "engine.model.cpu_steps.register_lanes", lambda: 8
    )  # kernels of half the size: less to compile
    path = generated_model.write(tmp_path / "model.gguf", layers=2, **MODELS[name])
    tokens = np.random.default_rng(1).integers(0, 256, 40).tolist()
    wanted = Reference(path).logits(tokens)
    steps = opened(path)
    steps.prefill(tokens[:32], 0)  # two tiles, and one that is filled up
    steps.prefill(tokens[32:36], 32)
    for position in range(36, 40):
        best = steps.decode(tokens[position], position)
        logits = steps.logits()
        assert best == logits.argmax()
        assert divergence(wanted[position], logits) < 1e-5


def test_long_context(tmp_path):
    """A chunk and more, so that attention spans several, and decode at depth."""
    path = generated_model.write(tmp_path / "model.gguf", layers=2, architecture="qwen3", quant="F32")
    tokens = np.random.default_rng(2).integers(0, 256, 300).tolist()
    wanted = Reference(path).logits(tokens)
    steps = opened(path, 512)
    for start in range(0, 290, steps.chunk):
        steps.prefill(tokens[start : min(start + steps.chunk, 290)], start)
    for position in range(290, 300):
        steps.decode(tokens[position], position)
        assert divergence(wanted[position], steps.logits()) < 1e-5


@pytest.mark.parametrize("name", ["tiny-llama-F32-0", "tiny-qwen3-Q4_K_M-0"])
def test_llama_cpps_logits(shared, make_model, tmp_path, name):
    shape, quant, _ = name.rsplit("-", 2)
    path = tmp_path / "model.gguf"
    make_model(shape, quant, path)
    oracle = np.load(shared / "oracle" / f"{name}.npz")
    tokens = oracle["tokens1"].tolist()
    steps = opened(path)
    steps.prefill(tokens[:-1], 0)
    greedy = [steps.decode(tokens[-1], len(tokens) - 1)]
    last = log_softmax(steps.logits())
    assert divergence(oracle["last_logits1"], steps.logits()) < (1e-6 if quant == "F32" else 1e-3)
    top = oracle["top16_ids1"][-1].astype(np.int64)
    if quant == "F32":
        np.testing.assert_allclose(last[top], oracle["top16_logprobs1"][-1], atol=2e-3)
    while len(greedy) < 24:
        greedy.append(steps.decode(greedy[-1], len(tokens) + len(greedy) - 1))
    if quant == "F32":
        assert greedy == oracle["greedy1"].tolist()
