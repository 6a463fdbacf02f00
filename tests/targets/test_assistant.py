"""Assistants on CPUs, held against a numpy reference and llama.cpp's drafts."""

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.description.assistant import read_assistant
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.cpu.runner import CPURunner
from tests import generated_model, oracles
from tests.generated_assistant import AssistantReference, write_assistant
from tests.paths import SHARED
from tests.reference import Reference, divergence
from tests.targets.layers import CONTEXT, written
from tests.thorough import rarely, thorough


def opened(path, path_of_assistant, parallel=1, kv=KVFormat.F16, context=CONTEXT):
    file, own = GGUF(path), GGUF(path_of_assistant)
    spec = read_spec(file)
    runner = CPURunner(Weights(file, spec, lambda _: None), context, parallel, kv=kv)
    assistant = runner.assistant(Weights(own, read_assistant(own, spec), lambda _: None), kv)
    assert not assistant.is_ready
    assistant.prepare()
    assert assistant.is_ready
    return runner, assistant


def drafts(runner, assistant, tokens, n, sequence=0):
    """`n` drafts after `tokens`, of which the model has read all but the last one."""
    blocks, done = KVBlocks(runner), 0
    while done < len(tokens) - 1:
        piece = tuple(tokens[:-1][done : done + runner.max_chunk])
        blocks.reserve(sequence, len(piece))
        runner.run([Slot(sequence, piece, done, "hidden")])
        blocks.commit(sequence, piece)
        done += len(piece)
    [stream] = runner.hidden()
    return assistant.draft(sequence, done - 1, tokens[-1], stream[-1], n)


# Tokens: within the window of 24 and beyond, and of several blocks.
@pytest.mark.parametrize("n", [6, rarely(40), rarely(200)])
def test_drafts_are_those_of_the_reference(tmp_path, n):
    path = written("gemma4 F32, rope factors", tmp_path)
    own = write_assistant(tmp_path / "a.gguf")
    tokens = list(map(int, np.random.default_rng(n).integers(0, 500, n)))
    wanted = list(AssistantReference(own, Reference(path)).drafts(tokens, 4))
    runner, assistant = opened(path, own, parallel=2)
    assert drafts(runner, assistant, tokens, 4, sequence=1) == [int(logits.argmax()) for logits in wanted]
    assert divergence(wanted[-1], assistant._logits) < 1e-8


def test_what_is_no_assistant_of_a_model_is_refused(tmp_path):
    spec = read_spec(GGUF(generated_model.write(tmp_path / "m.gguf", architecture="gemma4", layers=4)))
    without = read_spec(GGUF(generated_model.write(tmp_path / "l.gguf")))
    for model, shape, why in (
        (spec, {"width": 96}, "it reads 96 numbers of a token, and the model has 64"),
        (spec, {"kv_heads": 4}, "a KV cache with 4 heads of keys, and the model's has 2"),
        (spec, {"head_dim": 32}, "a KV cache with 32 elements in a head, and the model's has 16"),
        (spec, {"keys": {"attention.sliding_window": 8}}, "8 tokens in a window, and the model's has 24"),
        (without, {}, "the KV cache of a layer with a window, and the model has none"),
    ):
        file = GGUF(write_assistant(tmp_path / "a.gguf", **shape))
        with pytest.raises(ModelFileError, match=f"a.gguf cannot guess for this model: .*{why}"):
            read_assistant(file, model)
    with pytest.raises(ModelFileError, match="answers nothing itself"):
        read_spec(file)


@thorough
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.skipif(
    not (SHARED / "oracle" / "spec").is_dir(), reason="there are no oracles beside the checkout"
)
def test_drafts_are_llama_cpps(tmp_path, seed):
    for shape, name in ("tiny-gemma4", "m.gguf"), ("tiny-gemma4-drafter", "a.gguf"):
        oracles.make_model(SHARED, shape, "F32", tmp_path / name, oracles.VOCABULARY["tiny-gemma4"], seed)
    runner, assistant = opened(tmp_path / "m.gguf", tmp_path / "a.gguf", context=2 * CONTEXT)
    with np.load(SHARED / "oracle" / "spec" / f"tiny-gemma4-drafter-F32-{seed}-exact.npz") as answers:
        for k in (0, 1):
            tokens = [*map(int, answers[f"tokens{k}"]), int(answers[f"next{k}"])]
            assert drafts(runner, assistant, tokens, 6) == answers[f"drafts{k}"].tolist()
