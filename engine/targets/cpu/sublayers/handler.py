"""A sublayer on a CPU: what loads its weights and adds its kernels to a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from tinygrad import Tensor

from engine.description.spec import ModelSpec
from engine.description.sublayers import Weight
from engine.runtime.pictures import PictureRoom
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.cache import CPUCache
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.states import CPUStates
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.weights import CPUWeights, Matrix


@dataclass
class Loading:
    """What sublayers take their weights and their memory from. `choices`: of each mixture of experts, how often each
    expert was chosen, int32 (experts,). `routers`: those of streams, which two sublayers of a layer share."""

    weights: CPUWeights
    spec: ModelSpec
    lanes: int
    cache: CPUCache
    states: CPUStates
    pictures: PictureRoom | None = None
    choices: list[Tensor] = field(default_factory=list)
    routers: dict[Weight, Matrix] = field(default_factory=dict)


class Handler(ABC):
    """Holds the packed weights of a sublayer, and its cache or its state."""

    @classmethod
    def lacks(cls, part: Any) -> str:
        """What the kernels lack for a part (`engine.model.coverage.Kernels`): they read activations in units of 32."""
        narrow = (weight.cols for weight in part.weights if weight.cols % UNIT)
        return next((f"a matrix of {cols} columns" for cols in narrow), "")

    @abstractmethod
    def __init__(self, part: Any, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        """Loads a `part` of the description, which reads the residual stream through a `norm`. `is_added`: the last
        product adds the residual stream, because the result is not normed first. Raises ModelFileError."""

    @abstractmethod
    def add_kernels(self, step: StepBuilder) -> None:
        """Adds the kernels of the sublayer, of decode and of prefill."""

    def keep(self, step: StepBuilder) -> None:
        """Adds the kernels that leave something for later tokens, where no result is needed."""
        raise NotImplementedError

    @abstractmethod
    def add_uses(self, uses: BufferUses) -> None:
        """Says what the buffers are for."""
