"""What steps of all kinds have on a GPU: scratch memory, and the kernels so far."""

from __future__ import annotations

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.spec import ModelSpec
from engine.kernels.device_memory import device_zeros
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence


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
    """A step, to which handlers add their kernels. `layer_embeddings`: of the step's tokens, if there are any."""

    layer_embeddings: Tensor

    def __init__(self, memory: StepMemory) -> None:
        self.spec, self.input_scales, self.buffer = memory.spec, memory.input_scales, memory.buffer
        self.sequence = KernelSequence()
        self.add = self.sequence.add
