"""The CPU's kernels against the float32 reference, sublayer by sublayer."""

import pytest

from engine.kernels.cpu import memory
from engine.kernels.cpu.step_state import POSITION, TILES, TOKENS
from engine.kernels.cpu.thread_pool import default_pool
from engine.model.lower import coverage, cpu
from engine.model.lower.cpu import CPUModel
from tests.model.lower.layers import CONTEXT, MODELS, hold, opened, written

LANES = 8  # less to compile than 16


def ends(model, tile, sequence):
    """The kernels after which a sublayer's result is in the residual stream, and the buffers that hold it."""
    streams = [
        buffer for (name, of, _), buffer in model._scratch.items() if of == tile and name in ("x", "y")
    ]
    for i, (_, (out, *_)) in enumerate(sequence.programs):
        if i > 0 and any(out is stream for stream in streams):  # the first is the embedding
            yield i, out


# The caches of windows: rings that the steps go beyond, or the whole context where a ring would be no smaller.
@pytest.mark.parametrize(("name", "rewind"), [*((name, 0) for name in MODELS), ("gemma3 Q8_0", cpu.REWIND)])
def test_every_sublayer_agrees_with_the_reference(name, rewind, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "REWIND", rewind)
    path, pool = written(name, tmp_path), default_pool()
    weights = opened(path)
    if missing := coverage.lacking_parts(weights.spec, "CPU"):
        pytest.skip(f"the CPU's kernels do not have {missing}")
    model = CPUModel(weights, CONTEXT, pool, LANES, keep_packed=False)
    steps = {tile: model.step(tile).compile() for tile in (1, LANES)}

    def step(tile):
        sequence = steps[tile]

        def run(tokens, at):
            memory.view(model.tokens)[: len(tokens)] = tokens
            memory.view(model.state)[[POSITION, TILES, TOKENS]] = at, -(-len(tokens) // tile), len(tokens)
            done, streams = 0, []
            for i, stream in ends(model, tile, sequence):
                pool.run(sequence.first + done, i + 1 - done)
                done = i + 1
                streams.append(memory.view(stream).reshape(-1, model.spec.dim).copy())
            return streams

        return run

    assert (model.max_rewind is not None) == bool(model.spec.window and not rewind)
    hold(path, step(LANES), step(1), model.max_chunk)
