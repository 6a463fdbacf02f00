"""The runner of tensor graphs against the float32 reference. `test_graph.py` has every architecture."""

import numpy as np
import pytest
from tinygrad import Device
from tinygrad.helpers import Context

from engine.formats.kv_format import KVFormat
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.graph.runner import GraphRunner
from tests import generated_model
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.targets.layers import written
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import THOROUGH, rarely, thorough

# Plain loops: ORIN_THOROUGH compiles as for users.
plain = Context(NOOPT=int(not THOROUGH))
TOKENS = np.random.default_rng(1).integers(0, 256, 90).tolist()


@plain
@pytest.mark.parametrize("name", ["llama F32 untied, rope factors", rarely("phi3 Q8_0, 12 of 16 rotated")])
def test_prefill_and_decode_agree_with_float32(name, tmp_path, monkeypatch):
    path = written(name, tmp_path, **({} if THOROUGH else {"layers": 1}))  # a second one has the same kernels
    wanted = Reference(path).logits(TOKENS[:40])
    runner = LoneSequence(GraphRunner(opened(path), 64))
    runner.prefill(TOKENS[:32], 0)  # a whole chunk and a padded one
    runner.prefill(TOKENS[32:36], 32)
    for position in range(36, 40):  # looked at, captured, replayed twice
        best = runner.decode(TOKENS[position], position)
        logits = runner.logits()
        assert best == logits.argmax()
        assert divergence(wanted[position], logits) < 1e-5
    happens, raw = list[str](), runner.runner  # one wait at the end would be for all of a long prompt
    monkeypatch.setattr(raw, "_step", lambda slot, size: ())
    monkeypatch.setattr(raw, "_prefill", {32: lambda: happens.append("piece")})
    monkeypatch.setattr(Device[Device.DEFAULT], "synchronize", lambda *_: happens.append("wait"))
    raw.run([Slot(0, (1,), 40, "none")] * 2)
    assert happens == ["wait", "piece"] * 2


@thorough  # tests/driver and tests/app have models that are damaged
@plain
def test_numbers_that_are_not_finite(tmp_path):
    path = written("qwen3 F32", tmp_path)
    generated_model.damage(path, "blk.1.ffn_down.weight", row=3)
    runner = LoneSequence(GraphRunner(opened(path), 64))
    assert runner.decode(5, 0) == -1
    assert "output of layer 1 (ffn_gate, ffn_up, ffn_down) is" in str(
        runner.runner.not_finite(Slot(0, (5,), 0))
    )
    runner.runner.copy_block(0, -1, runner.blocks.tables(0)[0][0])
    assert not any(cache.numpy().any() for cache in runner.runner._transformer._caches)


@thorough  # test_cpu_runner.py has rows of several sequences, test_graph.py tables in any order
@plain
def test_sequences_side_by_side(tmp_path):
    """Sequences that grow in turn, so that their blocks alternate; pieces that end in the next block; one that begins
    with a full block and a part of another's, and one that is read at once with the others."""
    path = written("qwen3 F32", tmp_path)
    runner, reference = GraphRunner(opened(path), 128, parallel=3), Reference(path)
    blocks = KVBlocks(runner)
    texts = [TOKENS[:70], TOKENS[7:40], [*TOKENS[:50], *TOKENS[70:80]]]

    def run(slots: list[Slot]) -> list[int]:
        for slot in slots:
            blocks.reserve(slot.sequence, len(slot.inputs))
        best = runner.run(slots).tolist()
        for slot in slots:
            blocks.commit(slot.sequence, slot.inputs)
        return best

    def piece(sequence: int, n: int) -> Slot:
        done = blocks.length(sequence)
        return Slot(
            sequence, tuple(texts[sequence][done : min(done + n, len(texts[sequence]) - 1)]), done, "none"
        )

    def last(sequence: int) -> Slot:
        return Slot(sequence, (texts[sequence][-1],), len(texts[sequence]) - 1)

    for n in (20, 32, 32):
        run([slot for slot in (piece(0, n), piece(1, n - 5)) if slot.inputs])
    assert blocks.match(2, texts[2][:-1]) == 50
    assert len({*blocks.tables(0)[0], *blocks.tables(1)[0], *blocks.tables(2)[0]}) == 5
    for sequences in ((2, 0, 1), (1,), (0, 1, 2), (2, 1)):
        pieces = [piece(2, 32)] if 2 in sequences and blocks.length(2) < len(texts[2]) - 1 else []
        best = run([*pieces]) + run([last(s) for s in sequences])
        logits = runner.logits()
        np.testing.assert_array_equal(runner.logits([len(sequences) - 1])[0], logits[-1])
        assert best == logits.argmax(1).tolist()
        for sequence, token, row in zip(sequences, best, logits, strict=True):
            assert divergence(reference.logits(texts[sequence])[-1], row) < 1e-5
            texts[sequence].append(token)


@thorough
@plain
def test_a_quantized_cache_of_heads_of_several_blocks(tmp_path):
    path = generated_model.write(tmp_path / "model.gguf", quant="F32", layers=1, dim=128, heads=2, kv_heads=1)
    runner = LoneSequence(GraphRunner(opened(path), 64, kv=KVFormat.Q8_0))
    runner.prefill(TOKENS[:32], 0)
    runner.decode(TOKENS[32], 32)
    assert 0 < divergence(Reference(path).logits(TOKENS[:33])[-1], runner.logits()) < 1e-4
