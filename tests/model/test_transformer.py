"""The transformer against a float32 reference, and against llama.cpp's own logits where these are at hand."""

import numpy as np
import pytest
from tinygrad import Tensor

from engine.formats.gguf import GGUF
from engine.model.config import ModelConfig
from engine.model.graph_runner import GraphRunner
from engine.model.transformer import KVCache, Transformer
from engine.model.weights import Weights
from tests import generated_model
from tests.reference import Reference, divergence, log_softmax


def opened(path):
    file = GGUF(path)
    return Weights(file, ModelConfig.from_gguf(file), lambda _: None)


def all_logits(weights, tokens):
    transformer = Transformer(weights, KVCache(weights.config, 64))
    return transformer.logits(transformer(Tensor(np.asarray(tokens, np.int32)), 0)).numpy()


# Each type and each architecture once, tied and untied heads, with and without rope frequency factors.
MODELS = {
    "llama F32": {"quant": "F32", "rope_factors": True},
    "llama F16 untied": {"quant": "F16", "tied": False},
    "qwen2 BF16": {"architecture": "qwen2", "quant": "BF16"},
    "qwen3 Q4_0": {"architecture": "qwen3", "quant": "Q4_0"},
    "llama Q4_1": {"quant": "Q4_1"},
    "qwen2 Q5_0 untied": {"architecture": "qwen2", "quant": "Q5_0", "tied": False},
    "qwen3 Q5_1": {"architecture": "qwen3", "quant": "Q5_1"},
    "llama Q8_0": {"quant": "Q8_0", "rope_factors": True},
    "qwen3 Q4_K": {"architecture": "qwen3", "quant": "Q4_K", "dim": 256},
    "qwen2 Q5_K": {"architecture": "qwen2", "quant": "Q5_K", "dim": 256},
    "llama Q6_K": {"quant": "Q6_K", "dim": 256},
}


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_agree_with_float32(name, tmp_path):
    path = generated_model.write(tmp_path / "model.gguf", layers=2, **MODELS[name])
    tokens = np.random.default_rng(1).integers(0, 256, 40).tolist()
    wanted = Reference(path).logits(tokens)
    runner = GraphRunner(opened(path), 64)
    runner.prefill(tokens[:32], 0)  # a whole chunk and a padded one
    runner.prefill(tokens[32:36], 32)
    for position in range(36, 40):  # looked at, captured, replayed twice
        best = runner.decode(tokens[position], position)
        logits = runner.logits()
        assert best == logits.argmax()
        assert divergence(wanted[position], logits) < 1e-5


ORACLES = [
    "tiny-llama-F32",
    "tiny-llama-Q8_0",
    "tiny-llama-Q6_K",
    "tiny-llama-Q4_K",
    "tiny-qwen3-F32",
    "tiny-qwen3-Q8_0",
    "tiny-qwen3-Q4_K_M",
]


@pytest.fixture(scope="module", params=ORACLES)
def oracle(request, shared, make_model, tmp_path_factory):
    """(quantization, model file, what llama.cpp says of it)"""
    shape, _, quant = request.param.removeprefix("tiny-").partition("-")
    path = tmp_path_factory.mktemp("oracle") / "model.gguf"
    make_model(f"tiny-{shape}", quant, path)
    yield quant, path, np.load(shared / f"oracle/{request.param}-0.npz")
    path.unlink()


def test_agrees_with_llama_cpp(oracle):
    quant, path, wanted = oracle
    weights = opened(path)
    tokens = wanted["tokens0"]
    logits = all_logits(weights, tokens)
    assert divergence(wanted["last_logits0"], logits[-1]) < 1e-3
    if quant == "F32":
        top = np.take_along_axis(log_softmax(logits), wanted["top16_ids0"].astype(np.int64), 1)
        assert np.abs(top - wanted["top16_logprobs0"]).max() < 2e-3
    assert divergence(Reference(path).logits(tokens)[-1], logits[-1]) < 1e-5
    if quant == "F32":
        runner = GraphRunner(weights, 128)
        runner.prefill(tokens[:-1], 0)
        said = [int(tokens[-1])]
        for i in range(24):
            said.append(runner.decode(said[-1], len(tokens) - 1 + i))
        assert said[1:] == wanted["greedy0"].tolist()
