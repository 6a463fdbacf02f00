"""What steps of all kinds have on a GPU: scratch memory, and the kernels so far."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.spec import ModelSpec
from engine.kernels.device_memory import device_zeros
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence


@dataclass(frozen=True)
class Sums:
    """The result of a product: `parts` partial sums. `bias`: to be added to them. With a `post_norm`, they are normed
    before they are added to the stream."""

    tensor: Tensor
    parts: int
    bias: Tensor | None = None
    post_norm: Tensor | None = None


class StepMemory:
    """The memory that all steps of a kind share."""

    def __init__(self, spec: ModelSpec, input_scales: InputScales) -> None:
        self.spec, self.input_scales = spec, input_scales
        self.scratch: dict[tuple[str, int], Tensor] = {}

    def buffer(self, name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
        """Scratch memory that all layers share, (n,)."""
        if (name, n) not in self.scratch:
            self.scratch[name, n] = device_zeros(n, dtype)
        return self.scratch[name, n]


class Step:
    """A step, to which handlers add their kernels. `layer_embeddings`: of the step's tokens, if there are any.
    `of_layer`: what is to be added to the streams beside the residual one."""

    layer_embeddings: Tensor
    of_layer: Sums

    def __init__(self, memory: StepMemory) -> None:
        self.spec, self.input_scales, self.buffer = memory.spec, memory.input_scales, memory.buffer
        self.sequence = KernelSequence()
        self.add = self.sequence.add

    @abstractmethod
    def beside_stream(self, i: int) -> Tensor:
        """A stream beside the residual one, float32 (tokens * dim,); 0 stands for what a layer begins with."""
