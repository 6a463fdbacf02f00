"""Draft heads on CPUs, held against a numpy reference and llama.cpp's drafts."""

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.runtime.model_runner import Slot
from engine.targets.cpu.runner import CPURunner
from tests import generated_model, oracles
from tests.paths import SHARED
from tests.reference import Reference
from tests.targets.layers import CONTEXT
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import thorough


def opened(path, context=CONTEXT):
    file = GGUF(path)
    spec = read_spec(file)
    runner = CPURunner(Weights(file, spec, lambda _: None), context)
    head = runner.draft_head(Weights(file, spec.draft_head, lambda _: None), KVFormat.F16)
    assert not head.is_ready
    head.prepare()
    assert head.is_ready
    return runner, head


def drafts(runner, head, tokens, n, last=3):
    """`n` drafts after `tokens`, of which the model has read all but the last one, and the head all but the `last`
    pairs."""
    sequence, streams = LoneSequence(runner), []
    for first in range(0, len(tokens) - 1, runner.max_chunk):
        piece = tuple(tokens[:-1][first : first + runner.max_chunk])
        sequence.blocks.reserve(0, len(piece))
        runner.run([Slot(0, piece, first, "hidden")])
        sequence.blocks.commit(0, piece)
        streams += runner.hidden()
    before = np.concatenate([np.zeros_like(streams[0][:1]), *streams])
    head.store(0, tokens[:-last], before[:-last])
    return head.draft(len(tokens) - last, tokens[-last:], before[-last:], n)


@pytest.mark.parametrize("architecture", ["qwen35", pytest.param("qwen35moe", marks=thorough)])
def test_drafts_are_those_of_the_reference(tmp_path, architecture):
    path = generated_model.write(
        tmp_path / "m.gguf", architecture=architecture, quant="F32", layers=4, rotated=8, draft_head=True
    )
    runner, head = opened(path)
    tokens = list(map(int, np.random.default_rng(0).integers(0, 500, 40)))
    wanted = [int(logits.argmax()) for logits in Reference(path).drafts(tokens, 4)]
    assert drafts(runner, head, tokens, 4) == wanted
    assert drafts(runner, head, tokens, 4, last=1) == wanted  # over what the drafts before have stored


def test_lings_last_norm_has_the_name_of_a_layers(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", architecture="qwen35", layers=4, draft_head=True)
    file = GGUF(path)
    name = "blk.4.layer_output_norm.weight"
    file.tensors = {name if "shared_head_norm" in key else key: info for key, info in file.tensors.items()}
    assert read_spec(file).draft_head.output_norm.tensor == name


@thorough
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", ["tiny-qwen35-mtp", "tiny-qwen35moe-mtp"])
@pytest.mark.skipif(
    not (SHARED / "oracle" / "spec").is_dir(), reason="there are no oracles beside the checkout"
)
def test_drafts_are_llama_cpps(tmp_path, shape, seed):
    path = tmp_path / "m.gguf"
    oracles.make_model(SHARED, shape, "F32", path, 8224, seed)
    runner, head = opened(path, 512)
    with np.load(SHARED / "oracle" / "spec" / f"{shape}-F32-{seed}.npz") as answers:
        for k in (0, 1):
            tokens = [*map(int, answers[f"tokens{k}"]), int(answers[f"next{k}"])]
            assert drafts(runner, head, tokens, 6) == answers[f"drafts{k}"].tolist()
