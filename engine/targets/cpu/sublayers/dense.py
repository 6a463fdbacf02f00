"""A feed-forward layer on a CPU."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.feed_forward import Dense
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import Gate, gate_rows, sparsify
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class DenseHandler(Handler):
    """quantize · gate+up · [sparsify or gate] · quantize · down. `reads`: the matrices that read the tokens."""

    def __init__(self, part: Dense, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        self._norm, self._activation, self._sparsity = norm, part.activation, part.sparsity
        weights = loading.weights
        curve = [np.array(part.curve, np.float32)] if part.curve else []
        self._curve = next((memory.array(of, dtypes.float32) for of in curve), None)
        self.reads = [weights.matrix(weight) for weight in (part.gate, part.up) if weight]
        self._down = weights.matrix(part.down, added=is_added)
        *biases, self._down_bias, self._hidden_norm = (
            v and weights.vector(v) for v in (part.gate_bias, part.up_bias, part.down_bias, part.hidden_norm)
        )
        self._biases = biases if part.gate else biases[1:]

    def add_kernels(self, step: StepBuilder) -> None:
        step.add_result(*self.hidden(step), self._down_bias)

    def hidden(
        self, step: StepBuilder, inputs: dict[str, Tensor] | None = None, shared: str = ""
    ) -> tuple[Matrix, dict[str, Tensor]]:
        """Adds all kernels but the last product; returns that one's matrix and its activations. With `shared`, the name
        of the layer that all tokens share beside experts, it begins together with the router, whose `inputs` it
        reads."""
        if inputs is None:
            inputs = step.quantize(step.x, self.reads, norm=self._norm)
        first, *others = rows = [
            step.rows(shared + name, m.rows) for name, m in zip(("gate", "up"), self.reads, strict=False)
        ]
        for i, (out, matrix, bias) in enumerate(zip(rows, self.reads, self._biases, strict=True)):
            step.multiply(out, matrix, inputs, added=bias, concurrent=i > 0 or bool(shared))
        buffers, shape = step.buffers, step.buffers.sizes(self._down.cols // UNIT)
        if self._sparsity:
            kernel = sparsify(self._sparsity, buffers.lanes, step.tile)
            step.add(kernel, first, shape, *step.state, parts=step.parts)
        kind: Gate = "xielu" if self._curve is not None else self._activation
        if self._hidden_norm is not None:
            kernel = gate_rows(kind, buffers.lanes, step.tile, alone=not others)
            step.add(kernel, first, shape, *step.state, *others, parts=step.parts)
            norm, eps = self._hidden_norm, buffers.spec.eps
            return self._down, step.quantize(first, [self._down], norm=norm, eps=eps, name=shared)
        gate = kind, others[0] if others else None
        return self._down, step.quantize(first, [self._down], gate=gate, name=shared, curve=self._curve)

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), *(matrix.stream for matrix in self.reads))
        uses.add(BufferUse("FFN down"), self._down.stream)
        uses.add(BufferUse("norm"), *self._biases, self._down_bias, self._hidden_norm, self._curve)
