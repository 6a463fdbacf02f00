"""An assistant: its guesses are those of the reference."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.description.architectures import read_spec
from engine.description.assistant import read_assistant
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.model.draft_head import HeadFile
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.generated_assistant import AssistantReference, write_assistant
from tests.kernels.gpu.buffers import short_lists
from tests.reference import Reference

HEADS = {"heads": 2, "kv_heads": 1, "head_dim": 32}


def check_drafts_of_an_assistant() -> None:
    hold(20, 64, layers=2)


def check_drafts_of_an_assistant_after_a_long_prompt() -> None:
    hold(300, 600, kv=KVFormat.Q8_0)


def hold(n: int, context: int, kv: KVFormat = KVFormat.F16, **shape: Any) -> None:
    """Drafts after a text of `n` tokens, and drafts once more. Raises AssertionError where tokens or streams differ."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        how: dict[str, Any] = {"architecture": "gemma4", "layers": 3, "ffn": 64, "quant": "Q8_0"}
        path = generated_model.write(Path(folder) / "model.gguf", **how | HEADS | shape)
        own = write_assistant(Path(folder) / "assistant.gguf", quant="Q8_0", **HEADS)
        file, draft, reference = GGUF(path), GGUF(own), Reference(path, context)
        spec = read_spec(file)
        head = HeadFile(draft, read_assistant(draft, spec))
        wanted_of = AssistantReference(own, reference)
        runner = NvidiaRunner(
            Weights(file, head.beside(spec), lambda _: None), context, 2, kv=kv, is_early=True
        )
        assistant = runner.assistant(Weights(draft, head.spec, lambda _: None), kv)
    assistant.prepare()
    text = list(map(int, np.random.default_rng(0).integers(0, 500, n)))
    blocks, stream = KVBlocks(runner), reference.streams(text[:-1])[-1]
    blocks.reserve(1, len(text))
    runner.run([Slot(1, tuple(text[:-2]), 0, "none")])
    runner.run([Slot(1, (text[-2],), len(text) - 2)])
    last = runner.streams(1)
    assert last is not None and np.abs(last - stream[-1:]).max() < 0.02 * np.abs(stream).max()
    wanted = [int(logits.argmax()) for logits in wanted_of.drafts(text, 3)]
    for _ in range(2):
        assert assistant.draft(1, len(text) - 2, text[-1], last[0], 3) == wanted
