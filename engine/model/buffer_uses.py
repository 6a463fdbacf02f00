"""Which buffer of a model is used for what, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from tinygrad import Tensor, UOp

from engine.events import KernelRole
from engine.measure.kernel_roles import BufferUse
from engine.model.mixes import Attend, Delta, Dense, Experts, Weight
from engine.model.spec import ModelSpec


class BufferUses(dict[UOp, BufferUse]):
    """Buffer -> its use."""

    def add(self, use: BufferUse, *tensors: Tensor | None) -> None:
        self.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)

    def add_experts(
        self, mix: Experts, each: int, gate_up: Iterable[Tensor | None], down: Iterable[Tensor | None]
    ) -> None:
        """Adds the matrices and biases of all experts, of which a kernel uses `each` for a token."""
        self.add(BufferUse("experts gate+up", "token", mix.count, each=each), *gate_up)
        self.add(BufferUse("experts down", "token", mix.count, each=each), *down)


def role_of(spec: ModelSpec, weight: Weight) -> KernelRole:
    """The role of the kernels that multiply by a matrix."""
    if weight == spec.head:
        return "output head"
    if weight == spec.embedding:
        return "embedding"
    for mix in spec.mixes():
        match mix:
            case Attend() as a if weight in a.weights:
                return "attention output" if weight == a.o else "QKV projection"
            case Delta() as delta if weight in delta.weights:
                return "attention output" if weight == delta.out else "QKV projection"
            case Dense() as dense if weight in dense.weights:
                return "FFN down" if weight == dense.down else "FFN gate+up"
            case Experts() as e if weight in (e.router, e.shared_gate):
                return "router"
            case Experts() as e if weight in (e.gate, e.up, e.down):
                return "experts down" if weight == e.down else "experts gate+up"
    raise KeyError(weight)
