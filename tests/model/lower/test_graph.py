"""Tensor graphs against the float32 reference, sublayer by sublayer."""

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, UOp

from engine.fixes import matvec_heuristic
from engine.model.lower.graph import Transformer
from engine.model.memory_need import memory_need
from tests.model.lower.layers import CONTEXT, MODELS, hold, opened, written

CHUNK = 32


def hold_memory(transformer):
    """Raises AssertionError unless weights and caches take what was foretold."""
    need = memory_need(transformer.spec, CONTEXT, "CPU", "graph")
    assert need.cache_bytes == sum(cache.nbytes() for cache in transformer._caches)
    planes = [plane for matrix in transformer._matrices.values() for plane in matrix.planes.values()]
    assert need.weights_bytes == transformer.spec.vector_bytes + sum(plane.nbytes() for plane in planes)


@pytest.mark.parametrize("name", MODELS)
def test_every_sublayer_agrees_with_the_reference(name, tmp_path):
    path = written(name, tmp_path)
    matvec_heuristic.apply()
    transformer = Transformer(opened(path), CONTEXT + CHUNK, CONTEXT)
    hold_memory(transformer)
    position = UOp.variable("position", 0, CONTEXT - 1)

    def step(size):
        @TinyJit
        def streams(tokens, position):
            return Tensor.stack(*(x for x, _ in transformer.sublayers(tokens, position))).realize()

        streams.cnt = 1  # capture at the first call, not at the second

        def run(tokens, at):
            padded = [*tokens, *[0] * (size - len(tokens))]
            return list(streams(Tensor(np.array(padded, np.int32)).realize(), position.bind(at)).numpy())

        return run

    hold(path, step(CHUNK), step(1), CHUNK)
