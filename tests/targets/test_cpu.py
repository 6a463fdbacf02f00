"""The CPU's kernels against the float32 reference, sublayer by sublayer."""

import pytest

from engine.runtime import kv_blocks
from engine.runtime.kv_blocks import BLOCK, REWIND
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.model import CPUModel
from tests.targets.layers import CONTEXT, MODELS, hold, opened, written
from tests.targets.sublayers import cpu_step

LANES = 8  # less to compile than 16


# The pools of windows: so small that the steps take blocks again, or large enough for the whole context.
@pytest.mark.parametrize(("name", "rewind"), [*((name, 0) for name in MODELS), ("gemma3 Q8_0", REWIND)])
def test_every_sublayer_agrees_with_the_reference(name, rewind, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_blocks, "REWIND", rewind)
    path = written(name, tmp_path)
    weights = opened(path)
    model = CPUModel(weights, CONTEXT, default_pool(), LANES, keep_packed=False)
    sizes = {group.window: group.blocks * BLOCK for group in model.cache.groups}
    assert (min(sizes.values()) < CONTEXT) == bool(model.spec.window and not rewind)
    hold(path, cpu_step(model, LANES), cpu_step(model, 1), model.max_chunk)
