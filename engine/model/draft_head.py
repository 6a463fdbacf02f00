"""What guesses with what the model makes of its tokens: the draft head of the model's file, or an assistant, which has
a file of its own (`--draft`). Both are beside the model on its device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from engine.description.assistant import is_assistant, read_assistant
from engine.description.spec import ModelSpec
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.model.coverage import Target
from engine.model.draft_model import check_alike
from engine.protocol.events import EngineOptions
from engine.runtime.assistant_drafter import AssistantDrafter
from engine.runtime.head_drafter import DraftHead, HeadDrafter
from engine.runtime.model_runner import ModelRunner

NO_HEAD = "This model's file has no draft head, so nothing is guessed: --speculate auto looks tokens up in the text."
NO_CHECKS = (
    "What was to guess is not loaded: a step of this model checks no guesses. On GPUs, models with recurrent state "
    "check them for a single conversation (--parallel 1), and none does that runs as tensor graphs."
)


class HeadFile(NamedTuple):
    """What a draft head or an assistant is, and its file."""

    file: GGUF
    spec: ModelSpec

    @property
    def is_assistant(self) -> bool:
        return self.spec.narrowing is not None

    def beside(self, spec: ModelSpec) -> ModelSpec:
        """A model whose draft head this is to be: its steps leave what that reads."""
        return replace(spec, draft_head=self.spec)


def head_of(
    file: GGUF, spec: ModelSpec, draft: GGUF | None, options: EngineOptions, target: Target
) -> HeadFile | None:
    """The draft head of the model of a file that is to guess on a target, if it has one, or the assistant that the file
    `draft` is: what is named comes first. On GPUs a head has to be asked for: the first token waits a fifth to a third
    longer there, since the head reads the prompt too. Raises ModelFileError if the assistant is none of this model."""
    if draft and is_assistant(draft):
        if options.speculate == "off":
            return None
        check_alike(file, draft)
        return HeadFile(draft, read_assistant(draft, spec))
    is_best = options.speculate == "auto" and not draft and target == "cpu"
    wanted = spec.draft_head if options.speculate == "heads" or is_best else None
    return HeadFile(file, wanted) if wanted else None


def open_head(
    runner: ModelRunner, spec: ModelSpec, head: HeadFile | None, target: Target, kv: KVFormat
) -> HeadDrafter | AssistantDrafter | None:
    """What guesses for a model that `runner` runs on a target, whose steps check guesses; None if nothing can. Raises
    ModelFileError."""
    if not head or not runner.check_rows:
        return None
    weights = Weights(head.file, head.spec, lambda _: None)
    opened: DraftHead
    match target:
        case "cpu":
            from engine.targets.cpu.runner import CPURunner

            assert isinstance(runner, CPURunner)
            if head.is_assistant:
                return AssistantDrafter(runner.assistant(weights, kv), spec.vocab)
            opened = runner.draft_head(weights, kv)
        case "nvidia":
            from engine.targets.nvidia.runner import NvidiaRunner

            assert isinstance(runner, NvidiaRunner)
            if head.is_assistant:
                return AssistantDrafter(runner.assistant(weights, kv), spec.vocab)
            opened = runner.draft_head(weights, kv)
        case "graph":
            return None
    return HeadDrafter(opened, spec.vocab)
