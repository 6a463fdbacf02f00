"""The runner of tensor graphs against the float32 reference. `lower/test_graph.py` has every architecture."""

import numpy as np
import pytest

from engine.model.graph_runner import GraphRunner
from tests.model.lower.layers import opened, written
from tests.reference import Reference, divergence


@pytest.mark.parametrize("name", ["llama F32 untied, rope factors", "phi3 Q8_0, 12 of 16 rotated"])
def test_prefill_and_decode_agree_with_float32(name, tmp_path):
    path = written(name, tmp_path)
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
