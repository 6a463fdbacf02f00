"""The embeddings, which layers add again, on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.begin import Begin
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading


class BeginHandler(Handler):
    """The rows of the embeddings, which the norm after it reads."""

    def __init__(self, part: Begin, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        pass

    def add_kernels(self, step: StepBuilder) -> None:
        step.mixed = step.embeddings

    def add_uses(self, uses: BufferUses) -> None:
        pass
