"""The CPU's kernels against the float32 reference, sublayer by sublayer."""

import pytest

from engine.kernels.cpu.thread_pool import default_pool
from engine.model.lower import REWIND, coverage, cpu_cache
from engine.model.lower.cpu import CPUModel
from tests.model.lower.layers import CONTEXT, MODELS, hold, opened, written
from tests.model.lower.sublayers import cpu_step

LANES = 8  # less to compile than 16


# The caches of windows: rings that the steps go beyond, or the whole context where a ring would be no smaller.
@pytest.mark.parametrize(("name", "rewind"), [*((name, 0) for name in MODELS), ("gemma3 Q8_0", REWIND)])
def test_every_sublayer_agrees_with_the_reference(name, rewind, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_cache, "REWIND", rewind)
    path = written(name, tmp_path)
    weights = opened(path)
    if missing := coverage.lacking_part(weights.spec, "CPU"):
        pytest.skip(f"the CPU's kernels do not have {missing}")
    model = CPUModel(weights, CONTEXT, default_pool(), LANES, keep_packed=False)
    assert (model.cache.max_rewind is not None) == bool(model.spec.window and not rewind)
    hold(path, cpu_step(model, LANES), cpu_step(model, 1), model.max_chunk)
