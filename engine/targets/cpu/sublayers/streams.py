"""Streams beside the residual one, and what mixes them (`engine.description.altup`), on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from engine.description.altup import Correction, LowRank, Merge, Modes, Prediction
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.streams import correct, lengthen, predict
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.sublayers.layer_embedding import LayerEmbeddingHandler
from engine.targets.cpu.weights import Matrix


class LowRankHandler(Handler):
    """norm · quantize · left · quantize · right · add normed"""

    def __init__(self, part: LowRank, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights = loading.weights
        self._read, self._norm = norm, weights.vector(part.norm)
        self._left, self._right = weights.matrix(part.left), weights.matrix(part.right)

    def add_kernels(self, step: StepBuilder) -> None:
        assert self._read is not None
        narrow, wide = step.rows("low rank", self._left.rows), step.rows("low-rank result", self._right.rows)
        step.add_normed(step.out, step.x, self._read, added=False, eps=step.buffers.spec.stream_eps)
        step.multiply(narrow, self._left, step.quantize(step.out, [self._left]))
        step.multiply(wide, self._right, step.quantize(narrow, [self._right]))
        step.add_normed(step.out, wide, self._norm)

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), self._left.stream)
        uses.add(BufferUse("FFN down"), self._right.stream)
        uses.add(BufferUse("norm"), self._norm)


class _ModesHandler(Handler):
    """What mixes `count` streams."""

    def __init__(self, part: Modes, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, self._count = loading.weights, part.count
        if part.router not in loading.routers:
            loading.routers[part.router] = weights.matrix(part.router)
        self._router, self._router_norm = loading.routers[part.router], weights.vector(part.router_norm)
        self._coefficients = weights.vector(part.coefficients)

    def _routed(self, step: StepBuilder) -> Tensor:
        """Adds the product of the router."""
        routed = step.rows("routed", step.buffers.lanes)
        step.multiply(routed, self._router, step.quantize(step.x, [self._router], norm=self._router_norm))
        return routed

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("router"), self._router.stream, self._coefficients)
        uses.add(BufferUse("norm"), self._router_norm)


class PredictionHandler(_ModesHandler):
    """[quantize · begins · lengthen] · quantize · router · predict"""

    def __init__(self, part: Prediction, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        super().__init__(part, norm, is_added, loading)
        self._begins = [loading.weights.matrix(weight) for weight in part.begins]

    def add_kernels(self, step: StepBuilder) -> None:
        buffers, dim = step.buffers, step.buffers.spec.dim
        shape = buffers.sizes(dim // UNIT)
        if self._begins:
            step.streams = [step.rows(f"stream{i}", dim) for i in range(self._count)]
            add_as_long(step, step.streams[1:], self._begins, [step.x] * len(self._begins))
        predicted, *others = step.streams
        kernel, routed = predict(self._count, buffers.lanes, step.tile), self._routed(step)
        step.add(
            kernel, step.x, *others, predicted, shape, *step.state, routed, self._coefficients,
            parts=step.parts,
        )  # fmt: skip

    def add_uses(self, uses: BufferUses) -> None:
        super().add_uses(uses)
        uses.add(BufferUse("embedding"), *(matrix.stream for matrix in self._begins))


class CorrectionHandler(_ModesHandler):
    """quantize · router · correct · the embeddings of the layer · add normed, to each of the other streams"""

    def __init__(self, part: Correction, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        super().__init__(part, norm, is_added, loading)
        self._scale, self._norm = map(loading.weights.vector, (part.scale, part.embedding_norm))
        self._embedding = LayerEmbeddingHandler(part.embedding, None, False, loading)

    def add_kernels(self, step: StepBuilder) -> None:
        buffers, dim = step.buffers, step.buffers.spec.dim
        scaled, added = step.rows("scaled", dim), step.rows("of layer", dim)
        predicted, *others = step.streams
        kernel, routed = correct(self._count, buffers.lanes, step.tile), self._routed(step)
        step.add(
            kernel, step.x, *others, scaled, buffers.sizes(dim // UNIT), *step.state, predicted, routed,
            self._coefficients, self._scale, parts=step.parts,
        )  # fmt: skip
        step.multiply(added, *self._embedding.gated(step, scaled))
        for other in others:
            step.add_normed(other, added, self._norm)

    def add_uses(self, uses: BufferUses) -> None:
        super().add_uses(uses)
        uses.add(BufferUse("norm"), self._scale, self._norm)
        self._embedding.add_uses(uses)


class MergeHandler(Handler):
    """quantize · ends · lengthen · add"""

    def __init__(self, part: Merge, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        self._ends = [loading.weights.matrix(weight) for weight in part.ends]

    def add_kernels(self, step: StepBuilder) -> None:
        rows = [step.rows(f"merged{i}", step.buffers.spec.dim) for i in range(len(self._ends))]
        add_as_long(step, rows, self._ends, step.streams[1:])
        step.add_rows(rows, factor=1 / (len(rows) + 1))

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("embedding"), *(matrix.stream for matrix in self._ends))


def add_as_long(
    step: StepBuilder, outs: Sequence[Tensor], matrices: Sequence[Matrix], rows: Sequence[Tensor]
) -> None:
    """Adds the kernels of the products with rows, as long as the residual stream."""
    for out, matrix, row in zip(outs, matrices, rows, strict=True):
        step.multiply(out, matrix, step.quantize(row, [matrix]))
    buffers, n = step.buffers, len(outs)
    kernel, shape = lengthen(n, buffers.lanes, step.tile), buffers.sizes(buffers.spec.dim // UNIT)
    step.add(kernel, *outs, shape, *step.state, step.x, parts=step.parts)
