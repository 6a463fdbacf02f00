"""The kernels of a decode step on a GPU: embed . those of the sublayers' handlers . head . next token.

Everything that changes from step to step (the token, its position, keys and values) is in device memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.device_memory import device_zeros
from engine.targets.nvidia.decode_step import DecodeMemory, DecodeStep
from engine.targets.nvidia.device_sampler import Ending
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.products.epilogues import as_logits
from engine.targets.nvidia.kernels.residual_stream.embedding import embed
from engine.targets.nvidia.kernels.residual_stream.joining import copy_hidden
from engine.targets.nvidia.kernels.sampling.sampling import next_token
from engine.targets.nvidia.kernels.token_slots import HostRows
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT
from engine.targets.nvidia.sublayers.attention import SHORT
from engine.targets.nvidia.weights import GPUModel

_MEDIUM = 8192  # tokens: beyond `SHORT`, one captured step serves up to so many


class DecodeKernels(DecodeMemory):
    """Builds the kernels of decode steps."""

    def __init__(self, model: GPUModel, input_scales: InputScales, context: int) -> None:
        super().__init__(model.spec, input_scales)
        # the residual stream of the last steps, if a draft head may read it
        self.hidden_rows = HostRows(2 * model.spec.dim) if model.spec.draft_head else None
        self._model, self._context = model, context
        self.context_limits = [SHORT]
        while (limit := self.context_limits[-1]) < context:
            self.context_limits.append(max(_MEDIUM, limit * 4))
        splits = max(a.split(limit).splits for a in model.attention for limit in self.context_limits)
        self.attention_parts = (
            device_zeros(splits * max(a.query_size for a in self.spec.attention)),
            device_zeros(splits * max(a.heads for a in self.spec.attention) * 2),
        )

    def step(self, limit: int, ending: Ending) -> KernelSequence:
        """The kernels of a step after fewer than `limit` tokens, one of `context_limits`. The next token goes to the
        position among those of the ending, and to `state`."""
        return self._step(self._model, limit, ending)[0]

    def short_step(self, ending: Ending) -> KernelSequence:
        """The kernels of a step of a few layers (`GPUModel.shortened`) and the head, after few tokens."""
        return self._step(self._model.shortened(), self.context_limits[0], ending)[0]

    def outputs(self, limit: int, ending: Ending) -> Iterator[NDArray[np.float32]]:
        """Runs such a step as far as the embedding, and then each sublayer, and gives the residual stream."""
        sequence, ends = self._step(self._model, limit, ending)
        for first, end in itertools.pairwise([0, *ends]):
            sequence.run(first, end)
            yield self.h.numpy()

    def _step(self, model: GPUModel, limit: int, ending: Ending) -> tuple[KernelSequence, list[int]]:
        """The kernels of a step, and how many there are up to the embedding and to each sublayer."""
        products = [product for layer in model.layers for product in layer.handler.products]
        step = DecodeStep(self, limit, [*products, model.head])
        self._embed(step, model)
        ends = [len(step.sequence)]
        for following, layer in enumerate(model.layers, 1):
            if layer.renewed:
                stream = step.stream
                assert stream.parts is not None
                step.inputs = model.inputs(following - 1)
                step.begin_normed(self.h, stream.parts, stream.n_parts, layer.renewed)
            is_renewed = following < len(model.layers) and model.layers[following].renewed is not None
            step.inputs = [] if is_renewed else model.inputs(following)
            step.post_norm, step.scale = layer.post_norm, layer.scale
            step.is_followed_beside, step.factor = layer.is_followed_beside, layer.factor
            layer.handler.decode(step, layer.norm)
            ends.append(len(step.sequence))
        if self.hidden_rows:
            step.add(
                copy_hidden(1, self.spec.dim), out=self.hidden_rows.tensor, stream=self.h, state=self.state
            )
        blocks = model.head.n_blocks
        best = {"largest": device_zeros(blocks), "largest_rows": device_zeros(blocks, dtypes.int32)}
        buffers = {"logits": self.logits, **best, "bias": model.head_bias}
        epilogue = as_logits(self.spec.softcap, model.head_bias is not None)
        step.multiply(model.head, model.output_norm, epilogue, buffers, "head")
        tokens, sampler, choice = ending
        if choice and choice.draws:
            sampler.add_to(step.sequence, self.logits, self.state, tokens, choice)
        elif choice:
            step.add(next_token(blocks, self._context), state=self.state, tokens=tokens, **best)
        return step.sequence, ends

    def _embed(self, step: DecodeStep, model: GPUModel) -> None:
        spec, tables = self.spec, model.layer_tables
        last, blocks = model.layers[-1].handler.products[-1], UNIT // QUARTER
        inputs = [*{i.key: i for i in (*model.inputs(0), *(tables.inputs if tables else []))}.values()]
        step.inputs = [] if spec.centred else inputs
        outs: dict[str, Tensor | list[Tensor]]
        if model.embedding_norm:
            rows, squares = step.buffer("embedded", spec.dim), step.buffer("embedded squares", blocks)
            n_parts, outs = blocks, {"stream": rows, "squares": squares, "copies": [], "norms": []}
        else:
            outs = step.begin_stream(max(last.n_blocks, blocks))
            n_parts = step.stream.n_parts
        kernel = embed(
            model.embedding.single_matrix.layout, spec.vocab, spec.dim, n_parts, len(outs["copies"]), self._context,
            tuple(rope.pairs for rope in spec.ropes), spec.embedding_scale, model.of_positions,
        )  # fmt: skip
        step.add(
            kernel,
            **outs,
            angles=self.angles,
            state=self.state,
            tables=[table for of_rope in model.ropes for table in of_rope],
            planes=model.embedding.planes,
            of_positions=model.positions.planes if model.positions else [],
        )
        if model.embedding_norm:
            step.begin_normed(rows, squares, blocks, model.embedding_norm)
        if spec.centred:
            step.inputs = inputs
            step.layer_norm()
        if tables:
            tables.decode(step)
