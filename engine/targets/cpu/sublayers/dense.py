"""A feed-forward layer on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.sublayers import Dense
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class DenseHandler(Handler):
    """quantize · gate+up · quantize · down. `reads`: the matrices that read the tokens."""

    def __init__(self, part: Dense, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        self._norm, self._activation = norm, part.activation
        self.reads = [loading.weights.matrix(weight) for weight in (part.gate, part.up)]
        self._down = loading.weights.matrix(part.down, added=is_added)

    def add_kernels(self, step: StepBuilder) -> None:
        step.add_result(*self.hidden(step))

    def hidden(
        self, step: StepBuilder, inputs: dict[str, Tensor] | None = None, shared: str = ""
    ) -> tuple[Matrix, dict[str, Tensor]]:
        """Adds all kernels but the last product; returns that one's matrix and its activations. With `shared`, the name
        of the layer that all tokens share beside experts, it begins together with the router, whose `inputs` it
        reads."""
        if inputs is None:
            inputs = step.quantize(step.x, self.reads, norm=self._norm)
        gate, up = (
            step.rows(shared + name, m.rows) for name, m in zip(("gate", "up"), self.reads, strict=True)
        )
        step.multiply(gate, self.reads[0], inputs, concurrent=bool(shared))
        step.multiply(up, self.reads[1], inputs, concurrent=True)
        return self._down, step.quantize(gate, [self._down], gate=(self._activation, up), name=shared)

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), *(matrix.stream for matrix in self.reads))
        uses.add(BufferUse("FFN down"), self._down.stream)
