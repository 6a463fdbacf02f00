"""The embeddings of layers on a GPU: those of all layers at the begin of a step, and what a layer makes of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from engine.description.feed_forward import LayerEmbedding
from engine.description.spec import LayerEmbeddings
from engine.kernels.device_memory import part_of
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.epilogues import EMBED, STORE
from engine.targets.nvidia.kernels.residual_stream.layer_embeddings import (
    gate_embeddings,
    layer_embeddings,
    stride,
)
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.norms import Input, Norm, inputs_of, no_norm
from engine.targets.nvidia.prompt_step import PromptStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Handler, Layer, Loading


class LayerTables:
    """The weights of the embeddings of layers (`engine.description.spec.LayerEmbeddings`)."""

    def __init__(self, part: LayerEmbeddings, loading: Loading) -> None:
        self.part, self.norm = part, loading.vector(part.norm)
        self.table, self.projection = loading.product(part.table), loading.product(part.projection)
        self.products = self.table, self.projection
        self._no_norm = no_norm(loading.weights.spec.dim)

    @property
    def inputs(self) -> list[Input]:
        return inputs_of(self._no_norm, self.projection)

    def decode(self, step: DecodeStep) -> None:
        """Adds the kernels of a decode step of one row."""
        spec, part = step.spec, self.part
        rows = step.buffer("projection", part.layers * part.size)
        step.layer_embeddings = step.buffer("layer embeddings", part.layers * stride(1, part.size))
        step.multiply(self.projection, self._no_norm, STORE, {"out": rows}, "projection")
        kernel = layer_embeddings(
            self.table.single_matrix.layout, 1, spec.vocab, spec.dim, part.size, part.layers, 1, spec.eps,
            part.layers, False,
        )  # fmt: skip
        out, ids, planes = step.layer_embeddings, step.memory.state, self.table.planes
        step.add(kernel, out=out, ids=ids, sums=rows, norm=self.norm, planes=planes)

    def prefill(self, step: PromptStep, ids: Tensor, layers: Sequence[Layer]) -> None:
        """Adds the kernels for the tokens `ids`, as far as `layers` need them."""
        handlers = [layer.handler for layer in layers]
        used = max((h.embedded_layers for h in handlers), default=0)
        if not used:
            return
        spec, part, tokens = step.spec, self.part, step.tokens
        step.norm(self._no_norm, keeps_sizes=True)
        sums = step.product(self.projection.single_matrix, step.x, "projection", used * part.size)
        kernel = layer_embeddings(
            self.table.single_matrix.layout, tokens, spec.vocab, spec.dim, part.size, part.layers, sums.parts,
            spec.eps, used, True,
        )  # fmt: skip
        step.layer_embeddings = step.buffer("layer embeddings", used * stride(tokens, part.size))
        ins = {"sums": sums.tensor, "sizes": step.sizes, "norm": self.norm, "planes": self.table.planes}
        step.add(kernel, out=step.layer_embeddings, ids=ids, **ins)

    def roles(self, uses: BufferUses) -> None:
        """Adds what the buffers are for."""
        uses.add(BufferUse("embedding", "token", self.part.table.rows), *self.table.planes)
        uses.add(BufferUse("embedding"), *self.projection.planes)


class LayerEmbeddingHandler(Handler):
    """The weights through which a layer's embeddings are added."""

    def __init__(self, part: LayerEmbedding, loading: Loading) -> None:
        self.part, self.embedded_layers = part, part.layer + 1
        self.gate, self.proj = loading.product(part.gate), loading.product(part.proj)
        self.products = self.gate, self.proj

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        step.finish(self.proj, self.gated(step, norm), "proj")

    def gated(self, step: DecodeStep, norm: Norm) -> Tensor:
        """Adds the first product of a decode step; returns the input of the last one."""
        size = self.gate.stack.rows
        own = part_of(step.layer_embeddings, self.part.layer * stride(1, size), size)
        out = step.buffer("embedded", permuted_size(size))
        buffers = {"out": out, "embedding": own, "input_scale": step.input_scale(self.proj.single_matrix)}
        step.multiply(self.gate, norm, EMBED, buffers, "gate")
        return out

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm, keeps_sizes=True)
        size = self.gate.stack.rows
        gate = step.product(self.gate.single_matrix, step.x, "embedding_gate")
        first = self.part.layer * stride(step.embedded, size)
        own = part_of(step.layer_embeddings, first + step.first_embedded * size, step.tokens * size)
        out = step.activations("embedded", size)
        kernel = gate_embeddings(step.tokens, size, gate.parts, step.order)
        step.add(kernel, out=out, sums=gate.tensor, sizes=step.sizes, embedding=own)
        return step.product(self.proj.single_matrix, out, "embedding_proj")

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), *self.gate.planes)
        uses.add(BufferUse("FFN down"), *self.proj.planes)
