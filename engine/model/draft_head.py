"""The draft head that a model's file brings, beside the model on its device."""

from __future__ import annotations

from engine.description.spec import ModelSpec
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.model.coverage import Target
from engine.protocol.events import EngineOptions
from engine.runtime.head_drafter import DraftHead, HeadDrafter
from engine.runtime.model_runner import ModelRunner

NO_HEAD = "This model's file has no draft head, so nothing is guessed: --speculate auto looks tokens up in the text."
NO_CHECKS = (
    "The draft head is not loaded: a step of this model checks no guesses. On GPUs, models with recurrent state check "
    "them for a single conversation (--parallel 1), and none does that runs as tensor graphs."
)


def head_of(spec: ModelSpec, options: EngineOptions, target: Target) -> ModelSpec | None:
    """The draft head of a model that is to guess on a target, if it has one: a draft model that is named comes first.
    On GPUs it has to be asked for: the one reply that was measured there was slower with it."""
    is_best = options.speculate == "auto" and not options.draft and target == "cpu"
    return spec.draft_head if options.speculate == "heads" or is_best else None


def open_head(
    runner: ModelRunner, file: GGUF, spec: ModelSpec, head: ModelSpec | None, target: Target, kv: KVFormat
) -> HeadDrafter | None:
    """The draft head of a model that `runner` runs on a target, whose steps check guesses; None if it has none. Raises
    ModelFileError."""
    if not head or not runner.check_rows:
        return None
    opened: DraftHead
    weights = Weights(file, head, lambda _: None)
    match target:
        case "cpu":
            from engine.targets.cpu.runner import CPURunner

            assert isinstance(runner, CPURunner)
            opened = runner.draft_head(weights, kv)
        case "nvidia":
            from engine.targets.nvidia.runner import NvidiaRunner

            assert isinstance(runner, NvidiaRunner)
            opened = runner.draft_head(weights, kv)
        case "graph":
            return None
    return HeadDrafter(opened, spec.vocab)
