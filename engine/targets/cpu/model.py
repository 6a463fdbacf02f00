"""A model on a CPU: its weights, its KV cache, and what its steps (`step`) share."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.description.spec import Join, Narrowing, Sublayer
from engine.description.sublayers import Vector, Weight
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.measure.kernel_roles import BufferUse
from engine.runtime.pictures import PictureRoom
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.cache import CPUCache
from engine.targets.cpu.handlers import HANDLERS
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.experts import few_tokens
from engine.targets.cpu.kernels.lanes import max_chunk
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.states import CPUStates
from engine.targets.cpu.step_buffers import StepBuffers
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import CPUWeights, Matrix


@dataclass
class DraftInput:
    """The matrices and norms of a draft head's `Join`, or of an assistant's `Narrowing`, and `hidden`: what the model's
    head reads of the tokens before those of a step, float32 (tokens, dim of the model)."""

    of_embedding: Matrix
    of_hidden: Matrix
    hidden: Tensor
    embedding_norm: Tensor | None = None
    hidden_norm: Tensor | None = None
    back: Matrix | None = None


@dataclass
class Layer:
    """A sublayer. `scale`: what the stream is multiplied by after it, if there is something. `renewed`: see
    `Sublayer`."""

    norm: Tensor | None
    handler: Handler
    post_norm: Tensor | None
    scale: list[Tensor]
    renewed: Tensor | None = None


class CPUModel(StepBuffers):
    """A model's weights and KV cache for `parallel` sequences, and the buffers of its steps. Decode writes `logits`,
    float32 (rows, vocab or a little more)."""

    def __init__(
        self,
        weights: Weights,
        context: int,
        pool: ThreadPool,
        lanes: int,
        keep_packed: bool,
        parallel: int = 1,
        kv: KVFormat = KVFormat.F16,
        rows: int = 1,
        pictures: PictureRoom | None = None,
        trunk: CPUModel | None = None,
    ) -> None:
        """`kv`: the format of the cache. `rows`: of the largest decode step, if not of all sequences. `trunk`: of a
        draft head the model, whose matrices it shares; of an assistant also the cache. Raises ModelFileError."""
        spec = weights.spec
        chunk = max_chunk(lanes, pictures.whole if pictures else 0)
        lender = trunk if spec.narrowing else None
        self.cache: CPUCache = lender.cache if lender else CPUCache(spec, context, chunk, lanes, parallel, kv)
        self.states = CPUStates(parallel)
        loader = CPUWeights(weights, pool, lanes, keep_packed)
        # The largest matrices first, because repacking needs memory for both forms.
        shared = trunk.heads if trunk else {}
        self.embedding: Matrix = shared.get(spec.embedding) or loader.matrix(spec.embedding)
        if spec.is_tied:
            self.head = self.embedding
        else:  # an assistant's is in another file, maybe under the same name
            self.head = (None if lender else shared.get(spec.head)) or loader.matrix(spec.head)
        loading = Loading(loader, spec, lanes, self.cache, self.states, pictures)
        self.layers, self._choices = (
            [_layer(sublayer, later, loading) for sublayer, later in spec.blocks],
            loading.choices,
        )
        self.output_norm = _norm(loader, spec.output_norm, spec.output_norm_bias)
        self.embedding_norm = spec.embedding_norm and _norm(
            loader, spec.embedding_norm, spec.embedding_norm_bias
        )
        self.head_bias = spec.head_bias and loader.vector(spec.head_bias)
        self.layer_tables = loader.layer_tables(spec)
        tables = [loader.matrix(table) for table in spec.added_tables]
        joined = spec.join or spec.narrowing
        self.draft_input = _draft_input(joined, loader, max(chunk, rows)) if joined else None
        loader.finish()
        super().__init__(spec, context, self.cache.positions, pool, loader, lanes, pictures)
        indices = [
            (self.places, 2) if spec.positions == table else (self.sizes(0), 0) for table in spec.added_tables
        ]
        self.added_tables = [(table, *index) for table, index in zip(tables, indices, strict=True)]
        """Of what is added to embeddings: the matrix, and as in `embed` the numbers of its rows and their stride."""
        rows = max(rows, self.max_rows(parallel))
        self.logits = memory.zeros(rows * self.head.layout.groups(spec.vocab) * lanes, dtypes.float32)

    @property
    def heads(self) -> dict[Weight, Matrix]:
        """The matrices of the vocabulary."""
        return {self.spec.embedding: self.embedding, self.spec.head: self.head}

    def max_rows(self, parallel: int) -> int:
        """The rows of the largest decode step for `parallel` conversations: of some, in whole tiles."""
        tile = self.tile_of(parallel)
        return ceil(parallel / tile) * tile

    def tile_of(self, rows: int) -> int:
        """The tile for a decode step of so many rows: fewer than `lanes`, so that each row is computed as it is alone
        (`kernels.product.products_of_few`)."""
        return min(1 << (rows - 1).bit_length(), self.lanes // 2)

    @property
    def prompt_sizes(self) -> list[int]:
        """The most tokens of the steps of prompts: of a chunk and, in a mixture, of those whose experts have few tokens
        each."""
        few = min((few_tokens(part.used, part.count) for part in self.spec.experts), default=0)
        few = few // self.lanes * self.lanes
        return [few, self.max_chunk] if 0 < few < self.max_chunk else [self.max_chunk]

    def expert_choices(self) -> list[NDArray[np.int32]]:
        """See `ModelRunner.expert_choices`."""
        return [memory.view(choices).copy() for choices in self._choices]

    def uses(self) -> BufferUses:
        """The uses of the weights, the cache and the scratch buffers."""
        uses = BufferUses()
        uses.add(BufferUse("output head"), self.head.stream)
        uses.add(BufferUse("embedding", "token", self.spec.vocab), self.embedding.stream)
        uses.add(BufferUse("norm"), self.output_norm, self.head_bias, self.embedding_norm)
        for table, *_ in self.added_tables:
            uses.add(BufferUse("embedding", "token", table.rows), table.stream)
        self.add_uses(uses)
        for layer in self.layers:
            uses.add(BufferUse("norm"), layer.norm, layer.post_norm, *layer.scale, layer.renewed)
            layer.handler.add_uses(uses)
        if tables := self.layer_tables:
            uses.add(BufferUse("embedding", "token", self.spec.vocab), tables.table.data)
            uses.add(BufferUse("embedding"), tables.projection.stream, tables.norm)
        return uses


def _draft_input(join: Join | Narrowing, loader: CPUWeights, tokens: int) -> DraftInput:
    matrices = loader.matrix(join.of_embedding), loader.matrix(join.of_hidden, added=True)
    made = DraftInput(*matrices, memory.zeros(tokens * join.of_hidden.cols, dtypes.float32))
    if isinstance(join, Narrowing):
        made.back = loader.matrix(join.back)
    else:
        made.embedding_norm, made.hidden_norm = map(loader.vector, (join.embedding_norm, join.hidden_norm))
    return made


def _norm(loader: CPUWeights, norm: Vector, bias: Vector | None) -> Tensor:
    """The weights of a norm of the stream, and after them its bias if it has one."""
    if bias is None:
        return loader.vector(norm)
    joined = loader.joined([(norm, norm.size), (bias, bias.size)])
    assert joined is not None
    return joined


def _layer(sublayer: Sublayer, is_added_later: bool, loading: Loading) -> Layer:
    vector, spec = loading.weights.vector, loading.spec
    norm = sublayer.norm and _norm(loading.weights, sublayer.norm, sublayer.norm_bias)
    post_norm = sublayer.post_norm and vector(sublayer.post_norm)
    is_added = post_norm is None and not (spec.centred or is_added_later or sublayer.beside)
    read = None if sublayer.replaces else norm
    handler = HANDLERS[type(sublayer.operator)](sublayer.operator, read, is_added, loading)
    renewed = sublayer.renewed and vector(sublayer.renewed)
    return Layer(norm, handler, post_norm, [vector(sublayer.scale)] if sublayer.scale else [], renewed)
