"""The CPU runner against a float32 reference."""

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.model.architectures import read_spec
from engine.model.cpu_runner import CPURunner
from engine.model.weights import Weights
from tests import generated_model
from tests.model.test_transformer import MODELS
from tests.reference import Reference, divergence


def opened(path, context=256):
    file = GGUF(path)
    return CPURunner(Weights(file, read_spec(file), lambda _: None), context)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_agree_with_float32(name, tmp_path, monkeypatch):
    # Kernels of half the size: less to compile.
    monkeypatch.setattr("engine.model.cpu_runner.register_lanes", lambda: 8)
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
