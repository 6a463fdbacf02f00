"""A model's weights and KV cache as the GPU's kernels read them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, dtypes

from engine.formats.kv_format import KVFormat
from engine.kernels.gpu.chosen_experts import ChosenExperts
from engine.kernels.gpu.delta_net import DeltaHeads
from engine.kernels.gpu.device_memory import DeviceCounts, device_zeros, to_device
from engine.kernels.gpu.kv_cache import CACHE_SLACK, Heads, Stored, ring_for
from engine.kernels.gpu.upload import Part, upload
from engine.kernels.gpu.weight_repacking import (
    MatrixSpec,
    free_repacking_memory,
    prepare_repacking,
    repack,
)
from engine.measure.timeline import timeline
from engine.model.kv_blocks import BLOCK, blocks_of_one
from engine.model.lower import REWIND
from engine.model.lower.gpu_layers import (
    Attention,
    DeltaNet,
    Embedded,
    FeedForward,
    Layer,
    LayerTables,
    Mix,
    Mixture,
    SideBySide,
)
from engine.model.lower.gpu_matrices import Matrix, Product, matrices_of, product_of
from engine.model.mixes import Attend, Beside, Delta, Dense, Experts, LayerEmbedding, Vector
from engine.model.spec import ModelSpec, Sublayer
from engine.model.weights import Weights


@dataclass
class GPUModel:
    """All weights of a model and its KV cache. A tied output head is the same object as the embedding. `ropes`: the
    tables of cos and of sin of each, float32 (context, head_dim / 2). `temperature`: the factors of queries by
    position, float32 (context,), if there is a temperature. `choices`: those of the mixtures (`Mixture.choices`)."""

    spec: ModelSpec
    layers: list[Layer]
    embedding: Product
    head: Product
    output_norm: NDArray[np.float32]
    ropes: list[tuple[Tensor, Tensor]]
    temperature: Tensor | None
    choices: DeviceCounts
    layer_tables: LayerTables | None

    @property
    def products(self) -> list[Product]:
        heads = [self.head] if self.head is self.embedding else [self.embedding, self.head]
        if self.layer_tables:
            heads += [self.layer_tables.table, self.layer_tables.projection]
        return [product for layer in self.layers for product in layer.mix.products] + heads

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for product in self.products for matrix in product.all_matrices]

    @property
    def mixtures(self) -> list[Mixture]:
        mixes = [
            layer.mix.experts if isinstance(layer.mix, SideBySide) else layer.mix for layer in self.layers
        ]
        return [mix for mix in mixes if isinstance(mix, Mixture)]

    @property
    def attention(self) -> list[Attention]:
        return [layer.mix for layer in self.layers if isinstance(layer.mix, Attention)]

    @property
    def storing(self) -> list[Attention]:
        """The attention with a cache of its own."""
        return [a for a in self.attention if a.is_storing]

    @property
    def deltas(self) -> list[DeltaNet]:
        return [layer.mix for layer in self.layers if isinstance(layer.mix, DeltaNet)]

    @property
    def last_cached(self) -> Attention | DeltaNet:
        """The last layer that keeps something of a token for the next ones."""
        mixes = (layer.mix for layer in reversed(self.layers))
        return next(
            m for m in mixes if isinstance(m, DeltaNet) or (isinstance(m, Attention) and m.is_storing)
        )

    @property
    def piece_specs(self) -> list[MatrixSpec]:
        """The kinds of pieces that are packed by kernels of their own."""
        return list({piece.spec: None for matrix in self.matrices for piece in matrix.pieces})

    def begin_fill(self, weights: Weights) -> Future[None]:
        """Fills the matrices. On CUDA a thread does so, while the caller goes on. The result raises ModelFileError."""
        prepare_repacking(self.piece_specs)
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
        """Copies the matrices to the device and packs them there. Those of a kind come together, because each kind has
        memory of its own to repack in."""
        kinds: dict[MatrixSpec, list[Matrix]] = {}
        for matrix in self.matrices:
            kinds.setdefault(matrix.spec, []).append(matrix)
        by_kind = [[(m, piece) for m in matrices for piece in m.pieces] for matrices in kinds.values()]
        sources = [source for pieces in by_kind for _, piece in pieces for source in piece.sources]
        parts = (Part(weights.n_bytes(*source), partial(weights.read_into, *source)) for source in sources)
        with timeline.span("weights"), closing(upload(parts)) as uploaded:
            for pieces in by_kind:
                for matrix, piece in pieces:
                    repack(piece.spec, uploaded, matrix.planes, piece.first)
                    for weight, rows in piece.sources:
                        weights.release(weight, rows)
                free_repacking_memory()


@dataclass(frozen=True)
class CacheRoom:
    """What a KV cache has room for: `parallel` sequences of a `context` each, of which prefill takes up to `chunk`
    tokens at once, in the format `kv`. Several share pools of blocks, and `tables` are those of their blocks by window,
    made as layers need them; `attention`: what was made so far, in order."""

    context: int
    chunk: int
    parallel: int = 1
    kv: KVFormat = KVFormat.F16
    tables: dict[int, Tensor] = field(default_factory=dict)
    attention: list[Attention] = field(default_factory=list)

    def pool(self, window: int) -> int:
        """Blocks of a layer's pool."""
        return self.parallel * blocks_of_one(window, self.context, self.chunk)


def allocate(
    weights: Weights, context: int, chunk: int, parallel: int = 1, kv: KVFormat = KVFormat.F16
) -> GPUModel:
    """A model with device memory for its matrices, to be filled by `GPUModel.fill`, and for `parallel` sequences of a
    context of `context` tokens, of which prefill takes up to `chunk` at once, in the format `kv`. Raises
    ModelFileError."""
    spec, room = weights.spec, CacheRoom(context, chunk, parallel, kv)
    choices = DeviceCounts([mix.count for mix in spec.experts])
    left = iter(choices.arrays)
    embedding = head = product_of([spec.embedding])
    if not spec.is_tied:
        head = product_of([spec.head])
    tables = [rope.tables(context, context) for rope in spec.ropes]
    return GPUModel(
        spec=spec,
        layers=[_layer(weights, sublayer, room, left) for sublayer in spec.sublayers],
        embedding=embedding,
        head=head,
        output_norm=weights.vector(spec.output_norm),
        ropes=[(to_device(cos), to_device(sin)) for cos, sin in tables],
        temperature=to_device(spec.temperature.factors(context)) if spec.temperature else None,
        choices=choices,
        layer_tables=_layer_tables(weights),
    )


def _layer(weights: Weights, sublayer: Sublayer, room: CacheRoom, choices: Iterator[Tensor]) -> Layer:
    mix: Mix
    match sublayer.mix:
        case Attend() as part:
            mix = _attention(weights, part, room)
            room.attention.append(mix)
        case Delta() as part:
            mix = _delta_net(weights, part, room)
        case Dense() as part:
            mix = _feed_forward(part)
        case Experts() as part:
            mix = _mixture(weights, part, next(choices))
        case Beside() as part:
            mix = _side_by_side(weights, part, next(choices))
        case LayerEmbedding() as part:
            mix = Embedded(product_of([part.gate]), product_of([part.proj]), part.layer)
        case _:
            raise AssertionError("a part without kernels: engine.model.lower.coverage")
    norm = _ones(weights.spec.dim) if sublayer.norm is None else weights.vector(sublayer.norm)
    post_norm, scale = (_vector(weights, vector) for vector in (sublayer.post_norm, sublayer.scale))
    return Layer(norm, sublayer.norm is not None, mix, post_norm, scale)


@functools.cache
def _ones(n: int) -> NDArray[np.float32]:
    """The weight of a norm that is none."""
    return np.ones(n, np.float32)


def _vector(weights: Weights, vector: Vector | None) -> Tensor | None:
    return None if vector is None else to_device(weights.vector(vector))


def _attention(weights: Weights, part: Attend, room: CacheRoom) -> Attention:
    window, is_pool = part.window if part.window < room.context else 0, True
    stored: Stored = "keys and values" if part.v else "keys" if part.k else "nothing"
    sizes = (part.query_size, part.kv_size) if part.has_wide_norms else (part.head_dim, part.head_dim)
    norms = weights.joined_vectors(list(zip((part.q_norm, part.k_norm), sizes, strict=True)), 1.0)
    if norms is None and part.has_normed_values:
        norms = np.ones(sum(sizes), np.float32)
    biases = (
        (part.q_bias, part.query_size),
        (part.k_bias, part.kv_size if part.k else 0),
        (part.v_bias, part.kv_size if part.v else 0),
    )
    bias = weights.joined_vectors(biases, 0.0)
    heads = Heads(
        query=part.heads,
        kv=part.kv_heads,
        dim=part.head_dim,
        length=-(-room.context // CACHE_SLACK) * CACHE_SLACK + CACHE_SLACK,
        norm_eps=None if norms is None else weights.spec.eps,
        scale=part.scale,
        window=window,
        ring=ring_for(window, room.chunk + REWIND) if window and not is_pool else 0,
        temperature=weights.spec.temperature is not None,
        block=BLOCK if is_pool else 0,
        pool=room.pool(window) if is_pool else 0,
        kv_format=room.kv,
        stored=stored,
        normed_values=part.has_normed_values and stored != "nothing",
        gated=part.gate is not None,
    )
    if is_pool and window not in room.tables:
        room.tables[window] = device_zeros(room.parallel * heads.table_size, dtypes.int32)
    if part.cache_of is None:
        cache = [device_zeros(n, dtype) for n, dtype in heads.cache_planes]
    else:
        cache = room.attention[part.cache_of].cache
    return Attention(
        heads=heads,
        rope=part.rope,
        qkv=product_of([weight for weight in (part.gate, part.q, part.k, part.v) if weight]),
        bias=None if bias is None else to_device(bias),
        norms=None if norms is None else to_device(norms),
        wide=part.has_wide_norms,
        sinks=_vector(weights, part.sinks),
        o=product_of([part.o]),
        o_bias=_vector(weights, part.o_bias),
        cache=cache,
        tables=room.tables.get(window),
    )


def _delta_net(weights: Weights, part: Delta, room: CacheRoom) -> DeltaNet:
    heads = DeltaHeads(
        part.key_heads, part.value_heads, part.size, part.taps, weights.spec.eps, sequences=room.parallel
    )
    return DeltaNet(
        heads=heads,
        inputs=product_of([part.qkv, part.gate, part.beta, part.alpha]),
        vectors={
            name: to_device(weights.vector(vector))
            for name, vector in zip(("conv", "decay", "decay_bias", "norm"), part.vectors, strict=True)
        },
        out=product_of([part.out]),
        memory=device_zeros(heads.memory_size),
    )


def _side_by_side(weights: Weights, part: Beside, choices: Tensor) -> SideBySide:
    dense, experts = _feed_forward(part.dense), _mixture(weights, part.experts, choices)
    can_join = len(dense.gate_up.matrices) == 1 and experts.router_bias is None
    return SideBySide(
        dense=dense,
        dense_norm=weights.vector(part.dense_norm),
        dense_post_norm=to_device(weights.vector(part.dense_post_norm)),
        experts=experts,
        experts_norm=weights.vector(part.experts_norm),
        experts_post_norm=to_device(weights.vector(part.experts_post_norm)),
        router_norm=weights.vector(part.router_scale),
        first=Product(experts.router.matrices, beside=dense.gate_up) if can_join else None,
        down=Product(experts.down.matrices, experts.down.experts, beside=dense.down),
    )


def _layer_tables(weights: Weights) -> LayerTables | None:
    part = weights.spec.layer_embeddings
    if part is None:
        return None
    return LayerTables(
        table=product_of([part.table]),
        projection=product_of([part.projection]),
        norm=to_device(weights.vector(part.norm)),
        size=part.size,
        layers=part.layers,
        plain=_ones(weights.spec.dim),
    )


def _feed_forward(part: Dense) -> FeedForward:
    gate_up = product_of([part.gate, part.up], alternate=part.gate.type == part.up.type)
    return FeedForward(gate_up, product_of([part.down]), part.width, part.activation)


def _mixture(weights: Weights, part: Experts, choices: Tensor) -> Mixture:
    gate_up_bias = None
    if part.gate_bias and part.up_bias:
        biases = [weights.vector(bias) for bias in (part.gate_bias, part.up_bias)]
        gate_up_bias = to_device(np.stack(biases, axis=1).reshape(-1))
    scales = _vector(weights, part.scales)
    chosen = ChosenExperts(
        part.used, part.count, False, gate_up_bias is not None, part.least_sum, scales is not None
    )
    added = ChosenExperts(part.used, part.count, added=True, bias=part.down_bias is not None)
    routers, shared_down = [part.router, *([part.shared_gate] if part.shared_gate else [])], None
    rows = [weights.read(weight, range(weight.rows)) for weight in routers]
    router = product_of(routers)
    if part.shared:
        shared_gate_up = matrices_of([part.shared.gate, part.shared.up], alternate=True)
        router = Product([*router.matrices, *shared_gate_up])
        (shared_down,) = matrices_of([part.shared.down])
    return Mixture(
        part=part,
        router=router,
        router_rows=to_device(np.concatenate(rows).view(np.float32)),
        router_bias=_vector(weights, part.router_bias),
        gate_up=product_of([part.gate, part.up], alternate=True, experts=chosen),
        gate_up_bias=gate_up_bias,
        down=Product(matrices_of([part.down]), added, shared_down),
        down_bias=_vector(weights, part.down_bias),
        scales=scales,
        choices=choices,
    )
