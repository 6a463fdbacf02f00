"""Tensor graphs against the float32 reference, sublayer by sublayer."""

import pytest

from engine.fixes import fused_gathers, matvec_heuristic
from engine.formats.kv_format import KVFormat
from engine.model.memory_need import memory_need
from engine.runtime.checkpoints import checkpoint_slots
from engine.runtime.kv_blocks import BLOCK
from engine.targets.graph.inputs import StepInputs
from tests.targets.layers import CONTEXT, MODELS, hold, opened, written
from tests.targets.sublayers import WatchedTransformer, graph_step
from tests.thorough import THOROUGH, rarely

CHUNK = 32

# The model that decodes with the graph of single tokens. A token of the others is a chunk of one: what tells a graph of
# a token from one of a chunk are products, attention, choices of experts and delta nets, and it has all of them.
DECODED = "qwen35moe F32, 8 of 16 rotated"

# A commit is checked with models that have, together, each part of a spec. `test_cpu.py` reads all but one,
# and `test_graph_runner.py` the one with rope factors.
COMMON = (
    "mistral3 F32",
    "granite F32",
    "olmo2 F32",
    "deepseek2 F32",
    "gpt-oss F32",
    DECODED,
)


def hold_memory(transformer):
    """Raises AssertionError unless weights and caches take what was foretold."""
    need = memory_need(transformer.spec, CONTEXT, "graph")
    states = sum(t.nbytes() for state in transformer.states for t in state.tensors)
    cached = sum(cache.nbytes() for cache in transformer._caches)
    assert need.cache_bytes == cached
    assert need.states_bytes == (1 + checkpoint_slots(1)) * states
    planes = [plane for matrix in transformer._matrices.values() for plane in matrix.planes.values()]
    assert need.weights_bytes == transformer.spec.vector_bytes + sum(plane.nbytes() for plane in planes)


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("name", [name if name in COMMON else rarely(name) for name in MODELS])
def test_every_sublayer_agrees_with_the_reference(name, tmp_path):
    path = written(name, tmp_path)
    matvec_heuristic.apply()
    fused_gathers.apply()
    length = CONTEXT + CHUNK
    transformer = WatchedTransformer(opened(path), length, CONTEXT, 1, length // BLOCK, KVFormat.F16)
    hold_memory(transformer)
    inputs = StepInputs(1, length, length // BLOCK)
    inputs.assign(0, [5, 2, 7, 0, 8, 1, 4, 3, 6])
    prefill = graph_step(transformer, inputs, CHUNK)
    decode = graph_step(transformer, inputs, 1) if THOROUGH or name == DECODED else prefill
    hold(path, prefill, decode, CHUNK)
