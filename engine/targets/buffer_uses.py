"""Which buffer of a model is used for what, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from tinygrad import Tensor, UOp

from engine.description.feed_forward import Experts
from engine.measure.kernel_roles import BufferUse


class BufferUses(dict[UOp, BufferUse]):
    """Buffer -> its use."""

    def add(self, use: BufferUse, *tensors: Tensor | None) -> None:
        self.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)

    def add_experts(
        self, operator: Experts, each: int, gate_up: Iterable[Tensor | None], down: Iterable[Tensor | None]
    ) -> None:
        """Adds the matrices and biases of all experts, of which a kernel uses `each` for a token."""
        self.add(BufferUse("experts gate+up", "token", operator.count, each=each), *gate_up)
        self.add(BufferUse("experts down", "token", operator.count, each=each), *down)
