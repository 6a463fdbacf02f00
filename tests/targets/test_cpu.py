"""The CPU's kernels against the float32 reference, sublayer by sublayer."""

import pytest

from engine.formats.kv_format import KVFormat
from engine.runtime import kv_blocks
from engine.runtime.kv_blocks import BLOCK, REWIND
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.memory import memory_of
from engine.targets.cpu.model import CPUModel
from engine.targets.cpu.weights import CPUWeights, Matrix
from tests.opened import opened
from tests.targets.layers import AS_GRAPHS, CONTEXT, MODELS, hold, written
from tests.targets.sublayers import cpu_step
from tests.thorough import THOROUGH, rarely

LANES = 8  # less to compile than 16
WINDOWED = "gemma3 Q8_0"
STREAMS = "gemma3n F32"  # for a commit with two layers
# For a commit these read each token as a prompt's: `test_recurrent_models.py` has a delta net's steps of one token.
AS_PROMPTS = "qwen35moe F32, 8 of 16 rotated", STREAMS
# A commit is checked with models that have, together, each kind of layer. `test_cpu_runner.py` has Gemma's.
COMMON = (
    "gpt-oss F32",  # windows, sinks, biases
    "deepseek2 F32",  # latent attention, groups of experts
    "nemotron_h_moe F32, narrow",  # Mamba, no gates
    "qwen35moe F32, 8 of 16 rotated",  # delta nets, gated attention, a shared expert
    "jamba F32",  # selective scans
    STREAMS,
)


def watched(monkeypatch) -> list[Matrix]:
    """The matrices that are loaded from now on."""
    loaded, load = [], CPUWeights.matrix
    monkeypatch.setattr(
        CPUWeights, "matrix", lambda *how, **ways: loaded.append(load(*how, **ways)) or loaded[-1]
    )
    return loaded


# The pools of windows: so small that the steps take blocks again, or large enough for the whole context.
@pytest.mark.parametrize(
    ("name", "rewind"),
    [
        *((name, 0) if name in COMMON else rarely(name, 0) for name in MODELS if name not in AS_GRAPHS),
        rarely(WINDOWED, REWIND),
    ],
)
def test_every_sublayer_agrees_with_the_reference(name, rewind, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_blocks, "REWIND", rewind)
    path = written(name, tmp_path, **({} if THOROUGH or name != STREAMS else {"layers": 2}))
    weights = opened(path)
    loaded = watched(monkeypatch)
    model = CPUModel(weights, CONTEXT, default_pool(), LANES, keep_packed=False)
    need = memory_of(LANES)
    streams = {id(m.stream): memory.view(m.stream) for m in loaded}.values()  # layers may run several times
    caches = (a for _, kv in model.cache.layers for a in kv)
    assert sum(map(need.weight_bytes, need.loaded(model.spec))) == sum(a.nbytes for a in streams)
    assert need.cache_bytes(model.spec, CONTEXT, KVFormat.F16) == sum(a.nbytes for a in caches)
    sizes = {group.window: group.blocks * BLOCK for group in model.cache.groups}
    assert (min(sizes.values(), default=CONTEXT) < CONTEXT) == bool(model.spec.window and not rewind)
    rows = LANES if name in AS_PROMPTS and not THOROUGH else 1
    hold(path, cpu_step(model, LANES), cpu_step(model, rows), model.max_chunk)
