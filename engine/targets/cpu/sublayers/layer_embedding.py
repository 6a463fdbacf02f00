"""The embeddings of a layer on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.feed_forward import LayerEmbedding
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels.layer_embeddings import gate_embeddings
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class LayerEmbeddingHandler(Handler):
    """quantize · gate · gate embeddings · quantize · proj"""

    def __init__(self, part: LayerEmbedding, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        self._layer = part.layer
        self._gate = loading.weights.matrix(part.gate)
        self._proj = loading.weights.matrix(part.proj, added=is_added)

    def add_kernels(self, step: StepBuilder) -> None:
        step.add_result(*self.gated(step, step.x))

    def gated(self, step: StepBuilder, rows: Tensor) -> tuple[Matrix, dict[str, Tensor]]:
        """Adds all kernels but the last product, of rows of the stream's size; returns that one's matrix and its
        activations."""
        buffers, spec = step.buffers, step.buffers.spec
        of = spec.layer_embeddings
        assert of
        gate, gated = (step.rows(name, of.size) for name in ("gate", "layer gated"))
        step.multiply(gate, self._gate, step.quantize(rows, [self._gate]))
        kernel = gate_embeddings(of.size, of.layers, spec.dim, spec.eps, buffers.lanes, step.tile)
        reads = buffers.sizes(self._layer), *step.state, gate, *step.of_layers
        step.add(kernel, gated, *reads, parts=step.parts)
        return self._proj, step.quantize(gated, [self._proj])

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), self._gate.stream)
        uses.add(BufferUse("FFN down"), self._proj.stream)
