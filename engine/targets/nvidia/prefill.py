"""The kernels of a prefill step on a GPU: embed . those of the sublayers' handlers."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from engine.runtime.pictures import PictureRoom
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.prompt_products import prompt_order
from engine.targets.nvidia.kernels.residual_stream.embedding import embed_prompt
from engine.targets.nvidia.prompt_step import PromptMemory, PromptStep
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

    def order(self, tokens: int) -> Order:
        """The order of activations in a step of so many tokens."""
        products = (p for layer in self._model.layers for p in layer.handler.products if not p.experts)
        shapes = [(m.layout, m.rows, m.cols) for product in products for m in product.all_matrices]
        are_all = not (self._model.layer_tables or self._model.draft_input)
        return prompt_order(shapes, tokens, chip(), are_all)

    def step(self, tokens: int) -> KernelSequence:
        """The kernels for up to `tokens` tokens. The last sublayers that keep something of them for the next ones
        compute only that, and there is nothing after them."""
        layers, step, storing = (
            self._model.layers,
            PromptStep(self, tokens, self.order(tokens)),
            self.last_storing,
        )
        self._embed(step, self.ids, layers[: storing.start], self.places)
        for layer in layers[: storing.start]:
            layer.add_to(step, layer.handler.prefill)
        for layer in layers[storing.start : storing.stop]:
            layer.add_to(step, layer.handler.store)
        return step.sequence

    def whole_step(self, tokens: int) -> KernelSequence:
        """As `step`, with all sublayers. Leaves the residual stream after them (`MixedKernels.streams`)."""
        model, step = self._model, PromptStep(self, tokens, self.order(tokens))
        self._embed(step, self.ids, model.layers, self.places)
        for layer in model.layers:
            layer.add_to(step, layer.handler.prefill)
        step.norm(model.output_norm)  # adds the last result
        return step.sequence

    @property
    def last_storing(self) -> range:
        """The numbers of the last layers that keep something of a token for the next ones: one, or several that are
        beside each other."""
        layers = self._model.layers
        first = last = max(i for i, layer in enumerate(layers) if layer.handler.is_storing)
        while first and layers[first - 1].is_followed_beside:
            first -= 1
        return range(first, last + 1)

    def _embed(
        self, step: PromptStep, ids: Tensor, layers: Sequence[Layer], places: Tensor, first_place: int = 0
    ) -> None:
        """Starts the residual stream with the rows of `ids`, whose positions are those of `places` from `first_place`
        on, and computes the embeddings of `layers`, as far as they have any."""
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
            bool(self.pictures),
            model.of_positions,
            first_place,
        )
        of_positions = {"places": places, "of_positions": model.positions.planes} if model.positions else {}
        pictures = self.pictures[0] if self.pictures else None
        ins = {"ids": ids, "planes": model.embedding.planes, "pictures": pictures}
        step.add(kernel, stream=stream, **ins, **of_positions)
        if model.embedding_norm:
            step.renew(model.embedding_norm)
        if model.layer_tables:
            model.layer_tables.prefill(step, ids, layers)
        if model.draft_input:
            model.draft_input.begin(step, stream, self.hidden)
