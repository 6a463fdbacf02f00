"""A model's weights and KV cache as the GPU's kernels read them."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor

from engine.description.altup import Correction, LowRank, Merge, Prediction
from engine.description.attention import Attention, LatentAttention
from engine.description.feed_forward import Dense, Experts, LayerEmbedding, SideBySide
from engine.description.recurrent import DeltaNet, Mamba, ShortConv
from engine.description.spec import ModelSpec, Sublayer
from engine.description.sublayers import Operator, Weight
from engine.formats.kv_format import KVFormat
from engine.kernels.device_memory import DeviceCounts, to_device
from engine.loading.weights import Weights
from engine.measure.timeline import timeline
from engine.runtime.pictures import PictureRoom
from engine.targets.nvidia.draft_input import DraftInput
from engine.targets.nvidia.filling import fill, prepare
from engine.targets.nvidia.kernels.attention.kv_cache import LENGTH_UNIT
from engine.targets.nvidia.kernels.products.stacked_matrices import StackedMatrices
from engine.targets.nvidia.kernels.residual_stream.embedding import Positions
from engine.targets.nvidia.matrices import Matrix, Product, product_of
from engine.targets.nvidia.norms import Input, Norm, inputs_of
from engine.targets.nvidia.sublayers.attention import AttentionHandler
from engine.targets.nvidia.sublayers.delta_net import DeltaNetHandler
from engine.targets.nvidia.sublayers.dense import DenseHandler
from engine.targets.nvidia.sublayers.experts import ExpertsHandler
from engine.targets.nvidia.sublayers.handler import Handler, Layer, LentCache, Loading
from engine.targets.nvidia.sublayers.latent_attention import LatentAttentionHandler
from engine.targets.nvidia.sublayers.layer_embedding import LayerEmbeddingHandler, LayerTables
from engine.targets.nvidia.sublayers.mamba import MambaHandler
from engine.targets.nvidia.sublayers.recurrent import RecurrentHandler
from engine.targets.nvidia.sublayers.short_conv import ShortConvHandler
from engine.targets.nvidia.sublayers.side_by_side import SideBySideHandler
from engine.targets.nvidia.sublayers.streams import (
    CorrectionHandler,
    LowRankHandler,
    MergeHandler,
    PredictionHandler,
)

_ENOUGH = 4  # so many kernels of a shape in a step are enough to time them there

HANDLERS: dict[type[Operator], type[Handler]] = {
    Attention: AttentionHandler,
    LatentAttention: LatentAttentionHandler,
    DeltaNet: DeltaNetHandler,
    Mamba: MambaHandler,
    ShortConv: ShortConvHandler,
    Dense: DenseHandler,
    Experts: ExpertsHandler,
    SideBySide: SideBySideHandler,
    LayerEmbedding: LayerEmbeddingHandler,
    LowRank: LowRankHandler,
    Prediction: PredictionHandler,
    Correction: CorrectionHandler,
    Merge: MergeHandler,
}
"""What computes a sublayer, by the class of its description."""


@dataclass
class GPUModel:
    """All weights of a model and its KV cache. A tied output head is the same object as the embedding. `ropes`: the
    tables of cos and of sin of each, float32 (context, head_dim / 2). `temperature`: the factors of queries by
    position, float32 (context,), if there is a temperature. `choices`: those of the mixtures
    (`ExpertsHandler.choices`). `draft_input`: of a draft head, whose embedding and head may be its `trunk`'s."""

    spec: ModelSpec
    layers: list[Layer]
    embedding: Product
    head: Product
    output_norm: Norm
    embedding_norm: Norm | None
    head_bias: Tensor | None
    positions: Product | None
    ropes: list[tuple[Tensor, Tensor]]
    temperature: Tensor | None
    choices: DeviceCounts
    layer_tables: LayerTables | None
    draft_input: DraftInput | None = None
    trunk: GPUModel | None = None

    def inputs(self, first: int) -> list[Input]:
        """What the products of a decode step read of the stream with which layer `first` begins: those of that layer,
        and of the layers beside it. After the last one, it is the head's."""
        if first == len(self.layers):
            return inputs_of(self.output_norm, self.head)
        following = itertools.count(first)
        last = next(i for i in following if not self.layers[i].is_followed_beside)
        inputs = (i for layer in self.layers[first : last + 1] for i in layer.inputs)
        return [*{i.key: i for i in inputs}.values()]

    def shortened(self) -> GPUModel:
        """The model with its first layers only: as few as have products of each shape four times, or as often as all
        layers have, and end with the same kind of sublayer."""
        wanted, seen, last = Counter[StackedMatrices](), Counter[StackedMatrices](), self.layers[-1]
        for layer in self.layers:
            wanted.update(product.stack for product in layer.handler.products)
        for end, layer in enumerate(self.layers, 1):
            seen.update(product.stack for product in layer.handler.products)
            if (
                type(layer.handler) is type(last.handler)
                and not layer.is_followed_beside
                and all(seen[stack] >= min(n, _ENOUGH) for stack, n in wanted.items())
            ):
                return replace(self, layers=self.layers[:end])
        return self

    @property
    def of_positions(self) -> Positions | None:
        """The table of positions, as the kernels of the embedding take it."""
        if self.positions is None:
            return None
        matrix = self.positions.single_matrix
        return Positions(matrix.layout, matrix.rows)

    @property
    def heads(self) -> dict[Weight, Product]:
        """The matrices of the vocabulary."""
        return {self.spec.embedding: self.embedding, self.spec.head: self.head}

    @property
    def products(self) -> list[Product]:
        """The products of a decode step, of which schedules are searched, without those of a `trunk`."""
        heads = [self.head] if self.head is self.embedding else [self.embedding, self.head]
        if self.trunk:
            lent = list(map(id, self.trunk.heads.values()))
            heads = [product for product in heads if id(product) not in lent]
        if self.layer_tables:
            heads += self.layer_tables.products
        if self.draft_input:
            heads += self.draft_input.products
        if self.positions:
            heads.append(self.positions)
        return [product for layer in self.layers for product in layer.handler.products] + heads

    @property
    def matrices(self) -> list[Matrix]:
        """Each once, however many layers share it."""
        found = (matrix for product in self.products for matrix in product.all_matrices)
        return [*{id(matrix): matrix for matrix in found}.values()]

    @property
    def attention(self) -> list[AttentionHandler]:
        return [layer.handler for layer in self.layers if isinstance(layer.handler, AttentionHandler)]

    @property
    def storing(self) -> list[AttentionHandler]:
        """The attention with a cache of its own."""
        return [a for a in self.attention if a.is_storing]

    @property
    def recurrent(self) -> list[RecurrentHandler]:
        return [layer.handler for layer in self.layers if isinstance(layer.handler, RecurrentHandler)]

    def begin_fill(self, weights: Weights) -> Future[None]:
        """Fills the matrices. On CUDA a thread does so, while the caller goes on. The result raises ModelFileError."""
        prepare(self.matrices)
        if Device.DEFAULT.split(":")[0] == "CUDA":
            thread = ThreadPoolExecutor(1, "fill")
            filling = thread.submit(self._fill, weights)
            thread.shutdown(wait=False)
            return filling
        self._fill(weights)
        filled: Future[None] = Future()
        filled.set_result(None)
        return filled

    def _fill(self, weights: Weights) -> None:
        with timeline.span("weights"):
            fill(weights, self.matrices)


def allocate(
    weights: Weights,
    context: int,
    chunk: int,
    parallel: int = 1,
    kv: KVFormat = KVFormat.F16,
    pictures: PictureRoom | None = None,
    trunk: GPUModel | None = None,
) -> GPUModel:
    """A model with device memory for its matrices, which `GPUModel.begin_fill` fills, and for `parallel` sequences of a
    context of `context` tokens, of which prefill takes up to `chunk` at once, in the format `kv`. `pictures`: if
    prompts may have some. `trunk`: of a draft head the model, whose matrices it shares; of an assistant also the
    caches. Raises ModelFileError."""
    spec = weights.spec
    choices = DeviceCounts([operator.count for operator in spec.experts])
    lent = trunk.heads if trunk else {}
    embedding = head = lent.get(spec.embedding) or product_of(spec.embedding)
    caches: list[LentCache] = []
    if trunk and spec.narrowing:
        lent, caches = {}, [LentCache(a.heads.pool, a.tables, a.cache) for a in trunk.attention]
    if not spec.is_tied:
        head = lent.get(spec.head) or product_of(spec.head)
    tables = [rope.tables(context, context) for rope in spec.ropes]
    own = [bool(pictures and rope.sections) for rope in spec.ropes]  # of each sequence
    length = -(-context // LENGTH_UNIT) * LENGTH_UNIT
    tables = [
        (_repeated(cos, length, parallel), _repeated(sin, length, parallel)) if is_own else (cos, sin)
        for (cos, sin), is_own in zip(tables, own, strict=True)
    ]
    ropes = [(to_device(cos), to_device(sin)) for cos, sin in tables]
    temperature = to_device(spec.temperature.factors(context)) if spec.temperature else None
    looks_ahead = bool(pictures and pictures.whole)
    loading = Loading(
        weights, context, chunk, parallel, kv, ropes, temperature, iter(choices.arrays), looks_ahead, caches
    )
    layers = [_layer(*block, loading) for block in spec.blocks]
    return GPUModel(
        spec=spec,
        layers=layers,
        embedding=embedding,
        head=head,
        output_norm=loading.norm(spec.output_norm, spec.output_norm_bias),
        embedding_norm=loading.norm(norm, spec.embedding_norm_bias)
        if (norm := spec.embedding_norm)
        else None,
        head_bias=loading.vector(spec.head_bias),
        positions=product_of(spec.positions) if spec.positions else None,
        ropes=ropes,
        temperature=temperature,
        choices=choices,
        layer_tables=LayerTables(spec.layer_embeddings, loading) if spec.layer_embeddings else None,
        draft_input=DraftInput(joined, weights) if (joined := spec.join or spec.narrowing) else None,
        trunk=trunk,
    )


def _repeated(table: NDArray[np.float32], rows: int, times: int) -> NDArray[np.float32]:
    """A table with so many rows, the last ones zeros, several times."""
    return np.tile(np.pad(table, ((0, rows - len(table)), (0, 0))), (times, 1))


def _layer(sublayer: Sublayer, is_followed_beside: bool, loading: Loading) -> Layer:
    norm, handler = loading.norm(sublayer.norm, sublayer.norm_bias), HANDLERS[type(sublayer.operator)]
    post_norm, scale = loading.vector(sublayer.post_norm), loading.vector(sublayer.scale)
    made = handler(sublayer.operator, loading)
    beside = is_followed_beside, sublayer.picture_part, sublayer.factor
    renewed = loading.norm(sublayer.renewed, None) if sublayer.renewed else None
    return Layer(norm, made, post_norm, scale, *beside, renewed)
