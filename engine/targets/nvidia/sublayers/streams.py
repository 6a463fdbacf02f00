"""Streams beside the residual one, and what mixes them (`engine.description.altup`), on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tinygrad import Tensor

from engine.description.altup import Correction, LowRank, Merge, Modes, Prediction
from engine.description.feed_forward import Dense
from engine.kernels.device_memory import to_device
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.residual_stream.streams import Streams, correct, gather, merge, predict
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import floats_of
from engine.targets.nvidia.norms import Input, Norm, inputs_of, no_norm
from engine.targets.nvidia.prompt_step import PromptStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.dense import DenseHandler
from engine.targets.nvidia.sublayers.handler import Handler, Loading
from engine.targets.nvidia.sublayers.layer_embedding import LayerEmbeddingHandler

_LINE = 0.0, 0.0, 1.0, 0.0
"""The curve of a layer whose activation changes nothing."""


class LowRankHandler(Handler):
    """A layer without a gate whose activation changes nothing, and the norm of its result. What it reads is added to
    the stream, too."""

    def __init__(self, part: LowRank, loading: Loading) -> None:
        self._dense = DenseHandler(Dense(None, part.left, part.right, "silu", curve=_LINE), loading)
        self._norm, self.products = loading.vector(part.norm), self._dense.products

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        step.post_norm, step.own = self._norm, norm
        self._dense.decode(step, norm)

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.own = norm
        return replace(self._dense.prefill(step, norm), post_norm=self._norm)

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("norm"), self._norm)
        self._dense.roles(uses)


class _StreamsHandler(Handler):
    """What mixes streams. `whole`: as what kernels read the residual stream in decode (`Streams`)."""

    def __init__(self, count: int, loading: Loading) -> None:
        spec = loading.weights.spec
        self.count, self.eps, self.whole = count, spec.eps, Input(no_norm(spec.dim), 0, False)

    def inputs(self, norm: Norm) -> list[Input]:
        return [self.whole]

    def streams(self, step: DecodeStep | PromptStep) -> Streams:
        tokens = step.tokens if isinstance(step, PromptStep) else 0
        return Streams(tokens, step.spec.dim, self.count, self.eps)

    def others(self, step: DecodeStep | PromptStep) -> list[Tensor]:
        return [step.beside_stream(i) for i in range(1, self.count)]

    def begin(self, step: DecodeStep | PromptStep) -> tuple[int, dict[str, Tensor | list[Tensor] | None]]:
        """Lets a kernel change the residual stream: how many copies of it are left, and the buffers for that."""
        if isinstance(step, PromptStep):
            step.settle()
            step.changed()
            return 0, {"stream": step.h}
        (x,) = step.stream.inputs[self.whole.key]
        return len(step.inputs), {**step.begin_stream(self.streams(step).blocks), "x": x}


class _ModesHandler(_StreamsHandler):
    """`router`: its weights times those of the norm before it, float32 (count * dim,)."""

    def __init__(self, part: Modes, loading: Loading) -> None:
        super().__init__(part.count, loading)
        weights = loading.weights
        rows = floats_of(weights, part.router).reshape(part.count, -1) * weights.vector(part.router_norm)
        self.modes = {
            "router": to_device(rows.reshape(-1).astype(np.float32)),
            "coefficients": loading.vector(part.coefficients),
        }

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("router"), *self.modes.values())


class PredictionHandler(_ModesHandler):
    """Begins a layer, with what the one before has left for the other streams."""

    def __init__(self, part: Prediction, loading: Loading) -> None:
        super().__init__(part, loading)
        self._begins = [loading.product(weight) for weight in part.begins]
        self.products = tuple(self._begins)

    def inputs(self, norm: Norm) -> list[Input]:
        return [self.whole, *inputs_of(self.whole.norm, *self._begins)]

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        rows = [step.buffer(f"beginning {i}", step.spec.dim) for i, _ in enumerate(self._begins)]
        for product, out in zip(self._begins, rows, strict=True):
            step.multiply(product, self.whole.norm, STORE, {"out": out}, "begin_stream")
        self._predict(step, [Sums(out, 1) for out in rows])

    def prefill(self, step: PromptStep, norm: Norm) -> None:
        made = list[Sums]()
        if self._begins:
            step.norm(self.whole.norm, keeps_sizes=True)
            made = [
                step.product(p.single_matrix, step.x, f"beginning {i}") for i, p in enumerate(self._begins)
            ]
        self._predict(step, made)

    def _predict(self, step: DecodeStep | PromptStep, made: Sequence[Sums]) -> None:
        made = made or [step.of_layer]
        copies, buffers = self.begin(step)
        step.add(
            predict(self.streams(step), tuple(sums.parts for sums in made), copies),
            **buffers,
            predicted=step.beside_stream(0),
            others=self.others(step),
            rows=[sums.tensor for sums in made],
            norm=None if self._begins else made[0].post_norm,
            **self.modes,
        )

    def roles(self, uses: BufferUses) -> None:
        super().roles(uses)
        uses.add(BufferUse("embedding"), *(plane for product in self._begins for plane in product.planes))


class CorrectionHandler(_ModesHandler):
    """Ends a layer, and leaves what is to be added to the other streams (`Step.of_layer`)."""

    def __init__(self, part: Correction, loading: Loading) -> None:
        super().__init__(part, loading)
        self._scale = Norm(loading.weights.vector(part.scale), is_normed=False)
        self._embedding, self._norm = (
            LayerEmbeddingHandler(part.embedding, loading),
            loading.vector(part.embedding_norm),
        )
        self.products, self.embedded_layers = self._embedding.products, self._embedding.embedded_layers

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        step.inputs = [*step.inputs, *self._embedding.inputs(self._scale)]
        self._correct(step)
        product, dim = self._embedding.proj, step.spec.dim
        rows = step.buffer("of a layer", dim)
        x = step.input_of(product, [self._embedding.gated(step, self._scale)])
        kernel = matvec(product.stack, product.schedule, STORE, "proj")
        step.add(kernel, out=rows, x=x, planes=product.planes)
        step.of_layer = Sums(rows, 1, post_norm=self._norm)

    def prefill(self, step: PromptStep, norm: Norm) -> None:
        self._correct(step)
        step.of_layer = replace(self._embedding.prefill(step, self._scale), post_norm=self._norm)

    def _correct(self, step: DecodeStep | PromptStep) -> None:
        copies, buffers = self.begin(step)
        others = {"predicted": step.beside_stream(0), "others": self.others(step)}
        step.add(correct(self.streams(step), copies), **buffers, **others, **self.modes)

    def roles(self, uses: BufferUses) -> None:
        super().roles(uses)
        uses.add(BufferUse("norm"), self._norm)
        self._embedding.roles(uses)


class MergeHandler(_StreamsHandler):
    """Ends a model, with what the last layer has left for the other streams."""

    def __init__(self, part: Merge, loading: Loading) -> None:
        super().__init__(len(part.ends) + 1, loading)
        self._ends = [loading.product(weight) for weight in part.ends]
        self.products = tuple(self._ends)

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        dim, (x,), left = step.spec.dim, step.stream.inputs[self.whole.key], step.of_layer
        vectors = [step.buffer(f"end {i}", permuted_size(dim)) for i, _ in enumerate(self._ends)]
        scales = [step.input_scale(product.single_matrix) for product in self._ends]
        ins = {"x": x, "others": self.others(step), "rows": left.tensor, "norm": left.post_norm}
        step.add(gather(self.streams(step), 1), outs=vectors, **ins, input_scales=scales)
        made = []
        for i, (product, vector) in enumerate(zip(self._ends, vectors, strict=True)):
            made.append(Sums(step.buffer(f"ended {i}", dim), 1))
            kernel = matvec(product.stack, product.schedule, STORE, "end_stream")
            step.add(kernel, out=made[i].tensor, x=step.input_of(product, [vector]), planes=product.planes)
        self._merge(step, made)

    def prefill(self, step: PromptStep, norm: Norm) -> None:
        step.settle()
        vectors, left = (
            [step.activations(f"end {i}", step.spec.dim) for i, _ in enumerate(self._ends)],
            step.of_layer,
        )
        ins = {"x": step.h, "others": self.others(step), "rows": left.tensor, "norm": left.post_norm}
        step.add(gather(self.streams(step), left.parts, step.order), outs=vectors, **ins)
        ends = enumerate(zip(self._ends, vectors, strict=True))
        self._merge(step, [step.product(p.single_matrix, x, f"ended {i}") for i, (p, x) in ends])

    def _merge(self, step: DecodeStep | PromptStep, made: Sequence[Sums]) -> None:
        copies, buffers = self.begin(step)
        kernel = merge(self.streams(step), tuple(sums.parts for sums in made), copies)
        step.add(kernel, **buffers, rows=[sums.tensor for sums in made])

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("embedding"), *(plane for product in self._ends for plane in product.planes))
