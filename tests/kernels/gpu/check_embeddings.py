"""Prompts of which embeddings are made: their residual streams after the last sublayer are the reference's."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.kernels.gpu.buffers import short_lists
from tests.opened import opened
from tests.reference import Reference

SMALL = {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 2}


def check_streams_of_prompts() -> None:
    hold(architecture="qwen3", quant="Q8_0", **SMALL)


def check_streams_of_norms_after_and_windows() -> None:
    keys = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
    hold(architecture="gemma3", keys=keys, quant="Q8_0", **SMALL)


def check_streams_of_layer_norms() -> None:
    hold(architecture="phi2", quant="Q8_0", **SMALL | {"layers": 1})


def hold(**shape: Any) -> None:
    """Two pieces of a prompt, the second beside a piece of another and a reply; raises AssertionError where the stream
    differs."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        path = generated_model.write(Path(folder) / "model.gguf", **shape)
        weights, reference = opened(path), Reference(path, 128)
        runner = NvidiaRunner(weights, 128, 3, is_early=True)  # as in `check_mixed`
    tokens = np.random.default_rng(3).integers(0, 100, 45).tolist()
    wanted, blocks = reference.streams(tokens)[-1], KVBlocks(runner)
    sizes = np.linalg.norm(wanted, axis=1)
    for sequence in range(3):
        blocks.reserve(sequence, 46)
    for start, end, beside in (
        (0, 33, []),
        (33, 45, [Slot(2, tuple(tokens[:9]), 0, "hidden"), Slot(1, (tokens[0],), 0)]),
    ):
        runner.run([Slot(0, tuple(tokens[start:end]), start, "hidden"), *beside])
        for first, stream in zip((start, 0), runner.hidden(), strict=False):
            right = slice(first, first + len(stream))
            errors = np.linalg.norm(stream - wanted[right], axis=1) / sizes[right]
            assert errors.max() < 4e-3, errors  # the cache and the activations are rounded
    assert [len(stream) for stream in runner.hidden()] == [12, 9]
    assert np.abs(runner.logits()[0] - reference.logits(tokens[:1])[0]).max() < 0.02
