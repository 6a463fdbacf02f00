"""Which buffer of a model is used for what, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from tinygrad import Tensor, UOp

from engine.measure.kernel_roles import BufferUse


class BufferUses(dict[UOp, BufferUse]):
    """Buffer -> its use."""

    def add(self, use: BufferUse, *tensors: Tensor | None) -> None:
        self.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)
