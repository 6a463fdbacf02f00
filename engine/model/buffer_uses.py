"""Which buffer of a model is used for what, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from tinygrad import Tensor, UOp

from engine.events import KernelRole
from engine.measure.kernel_roles import BufferUse
from engine.model.spec import Attend, ModelSpec, Weight


class BufferUses(dict[UOp, BufferUse]):
    """Buffer -> its use."""

    def add(self, use: BufferUse, *tensors: Tensor | None) -> None:
        self.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)


def role_of(spec: ModelSpec, weight: Weight) -> KernelRole:
    """The role of the kernels that multiply by a matrix."""
    if weight == spec.head:
        return "output head"
    if weight == spec.embedding:
        return "embedding"
    for sublayer in spec.sublayers:
        if weight in sublayer.mix.weights:
            if isinstance(sublayer.mix, Attend):
                return "attention output" if weight == sublayer.mix.o else "QKV projection"
            return "FFN down" if weight == sublayer.mix.down else "FFN gate+up"
    raise KeyError(weight)
