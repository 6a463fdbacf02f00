"""Tensor graphs against the float32 reference, sublayer by sublayer."""

import pytest

from engine.fixes import fused_gathers, matvec_heuristic
from engine.formats.kv_format import KVFormat
from engine.model.memory_need import memory_need
from engine.runtime.checkpoints import checkpoint_slots
from engine.runtime.kv_blocks import BLOCK
from engine.targets.graph.inputs import StepInputs
from tests.opened import opened
from tests.targets.layers import CONTEXT, MODELS, hold, written
from tests.targets.sublayers import WatchedTransformer, graph_step
from tests.thorough import THOROUGH, rarely

CHUNK = 32

# A commit is checked with windows, sinks, biases and experts. `test_graph_runner.py` has a plain model, and decodes by
# the graph of single tokens; `test_delta_graph.py` has delta nets.
COMMON = "gpt-oss F32"


def hold_memory(transformer):
    """Raises AssertionError unless weights and caches take what was foretold."""
    need = memory_need(transformer.spec, CONTEXT, "graph")
    states = sum(t.nbytes() for state in transformer.states for t in state.tensors)
    caches = *transformer._caches, *transformer._index_caches
    cached = sum(cache.nbytes() for cache in caches)
    assert need.cache_bytes == cached
    assert need.states_bytes == (1 + checkpoint_slots(1)) * states
    planes = [plane for matrix in transformer._matrices.values() for plane in matrix.planes.values()]
    assert need.weights_bytes == transformer.spec.vector_bytes + sum(plane.nbytes() for plane in planes)


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("name", [name if name == COMMON else rarely(name) for name in MODELS])
def test_every_sublayer_agrees_with_the_reference(name, tmp_path):
    path = written(name, tmp_path, **({} if THOROUGH else {"layers": 1}))
    matvec_heuristic.apply()
    fused_gathers.apply()
    length = CONTEXT + CHUNK
    transformer = WatchedTransformer(opened(path), length, CONTEXT, 1, length // BLOCK, KVFormat.F16)
    hold_memory(transformer)
    inputs = StepInputs(1, length, length // BLOCK)
    inputs.assign(0, [5, 2, 7, 0, 8, 1, 4, 3, 6])
    prefill = graph_step(transformer, inputs, CHUNK)
    decode = graph_step(transformer, inputs, 1) if THOROUGH else prefill
    hold(path, prefill, decode, CHUNK)
