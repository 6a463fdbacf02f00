"""The kernels of a prefill step on a GPU: embed . those of the sublayers' handlers."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from engine.runtime.pictures import PictureRoom
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.residual_stream.embedding import embed_prompt
from engine.targets.nvidia.prompt_step import Pending, PromptMemory, PromptStep
from engine.targets.nvidia.sublayers.handler import Layer
from engine.targets.nvidia.weights import GPUModel


class PrefillKernels(PromptMemory):
    """Builds the kernels of prefill steps."""

    def __init__(
        self, model: GPUModel, input_scales: InputScales, chunk: int, room: PictureRoom | None = None
    ) -> None:
        """`room`: if prompts may have pictures."""
        super().__init__(model.spec, input_scales, chunk, room)
        self._model = model

    def step(self, tokens: int) -> KernelSequence:
        """The kernels for up to `tokens` tokens. The last sublayer that keeps something of them for the next ones
        computes only that, and there is nothing after it."""
        layers, step, n = self._model.layers, PromptStep(self, tokens), self.last_storing
        self._embed(step, self.ids, layers[:n])
        for layer in layers[:n]:
            sums = layer.handler.prefill(step, layer.norm)
            step.pending = Pending(sums, layer.post_norm, layer.scale)
        layers[n].handler.store(step, layers[n].norm)
        return step.sequence

    def whole_step(self, tokens: int) -> KernelSequence:
        """As `step`, with all sublayers. Leaves the residual stream after them (`MixedKernels.streams`)."""
        model, step = self._model, PromptStep(self, tokens)
        self._embed(step, self.ids, model.layers)
        for layer in model.layers:
            step.pending = Pending(layer.handler.prefill(step, layer.norm), layer.post_norm, layer.scale)
        step.norm(model.output_norm)  # adds the last result
        return step.sequence

    @property
    def last_storing(self) -> int:
        """The number of the last layer that keeps something of a token for the next ones."""
        return max(i for i, layer in enumerate(self._model.layers) if layer.handler.is_storing)

    def _embed(self, step: PromptStep, ids: Tensor, layers: Sequence[Layer]) -> None:
        """Starts the residual stream with the rows of `ids`, and computes the embeddings of `layers`, as far as they
        have any."""
        model, spec, embedding = self._model, self.spec, self.spec.embedding
        layout, stream = model.embedding.single_matrix.layout, step.h
        if embedding.cols != spec.dim:
            stream = step.buffer("embedded", step.tokens * embedding.cols)
        kernel = embed_prompt(
            layout,
            step.tokens,
            embedding.rows,
            embedding.cols,
            spec.embedding_scale,
            self.pictures is not None,
        )
        step.add(kernel, stream=stream, ids=ids, planes=model.embedding.planes, pictures=self.pictures)
        if model.layer_tables:
            model.layer_tables.prefill(step, ids, layers)
        if model.joint:
            model.joint.begin(step, stream, self.hidden)
