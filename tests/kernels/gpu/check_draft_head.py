"""A draft head: its guesses are those of the reference."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.kernels.gpu.buffers import short_lists
from tests.reference import Reference
from tests.tier import THOROUGH

SMALL = {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 2, "quant": "Q8_0"}


def check_drafts() -> None:
    hold(architecture="qwen35", **SMALL)


def check_drafts_of_a_mixture() -> None:
    hold(architecture="qwen35moe", **SMALL | {"dim": 192, "heads": 4, "kv_heads": 2})


def check_drafts_after_a_long_prompt() -> None:
    hold(300, 600, architecture="qwen35", **SMALL)


def hold(n: int = 20, context: int = 32, **shape: Any) -> None:
    """Drafts of a head that has read most of a text as a prompt, and the last pairs with them; and drafts once more.
    Raises AssertionError where tokens or streams differ."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        path = generated_model.write(Path(folder) / "model.gguf", draft_head=True, **shape)
        file, reference = GGUF(path), Reference(path, context)
        spec = read_spec(file)
        runner = NvidiaRunner(Weights(file, spec, lambda _: None), context, is_early=True)
        assert spec.draft_head
        head = runner.draft_head(Weights(file, spec.draft_head, lambda _: None), KVFormat.F16)
    head.prepare()
    text = list(map(int, np.random.default_rng(0).integers(0, 500, n)))
    stream = reference.streams(text[:-1])[-1]
    if THOROUGH:  # a commit is checked with the streams of steps in check_assistant
        KVBlocks(runner).reserve(0, len(text))
        runner.run([Slot(0, tuple(text[:-2]), 0, "none")])
        runner.run([Slot(0, (text[-2],), len(text) - 2)])
        last = runner.streams(1)
        assert last is not None and np.abs(last - stream[-1:]).max() < 0.02 * np.abs(stream).max()
    before = np.concatenate([np.zeros_like(stream[:1]), stream])
    wanted = [int(logits.argmax()) for logits in reference.drafts(text, 3)]
    head.store(0, text[:-4], before[:-4])
    assert head.draft(len(text) - 4, text[-4:], before[-4:], 3) == wanted
    assert head.draft(len(text) - 1, text[-1:], before[-1:], 3) == wanted
