"""The transformer in tensor graphs against a float32 reference."""

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.model.architectures import read_spec
from engine.model.graph_runner import GraphRunner
from engine.model.weights import Weights
from tests import generated_model
from tests.reference import Reference, divergence


def opened(path):
    file = GGUF(path)
    return Weights(file, read_spec(file), lambda _: None)


# Every architecture, tied and untied heads, with and without rope frequency factors, floats and blocks of both sizes.
# Every quantization type by itself is proven in tests/kernels.
MODELS = {
    "llama F32 untied": {"quant": "F32", "tied": False},
    "llama Q8_0 rope factors": {"quant": "Q8_0", "rope_factors": True},
    "qwen2 BF16 untied": {"architecture": "qwen2", "quant": "BF16", "tied": False},
    "qwen3 Q6_K": {"architecture": "qwen3", "quant": "Q6_K", "dim": 256, "ffn": 256},
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
