"""A model's weights and KV cache as the GPU's kernels read them: matrices packed on the device, with those of the same
input in one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, dtypes

from engine.formats.kv_format import KVFormat
from engine.kernels.gpu.chosen_experts import ChosenExperts
from engine.kernels.gpu.delta_net import DeltaHeads
from engine.kernels.gpu.device_memory import DeviceCounts, device_zeros, to_device
from engine.kernels.gpu.kv_cache import CACHE_SLACK, Heads, ring_for
from engine.kernels.gpu.matvec import StackedMatrices
from engine.kernels.gpu.schedules import best_schedule
from engine.kernels.gpu.upload import Part, upload
from engine.kernels.gpu.weight_layout import WeightLayout
from engine.kernels.gpu.weight_repacking import (
    MatrixSpec,
    TensorRows,
    free_repacking_memory,
    prepare_repacking,
    repack,
)
from engine.measure.timeline import timeline
from engine.model.kv_blocks import BLOCK
from engine.model.lower import REWIND
from engine.model.mixes import Activation, Attend, Delta, Dense, Experts, Vector, Weight
from engine.model.spec import ModelSpec, Sublayer
from engine.model.weights import Weights, pieces

_PIECE_ROWS = 32  # so that a plane of a piece begins where kernels may load several numbers at once


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix, from `first` on, that are repacked at once. `sources`: rows of each of its weights."""

    spec: MatrixSpec
    first: int
    sources: tuple[tuple[Weight, range], ...]


@dataclass
class Matrix:
    """A repacked matrix. Its rows come from `weights`."""

    weights: Sequence[Weight]
    spec: MatrixSpec

    def __post_init__(self) -> None:
        self.planes = self.spec.allocate()

    @property
    def layout(self) -> WeightLayout:
        return self.spec.layout

    @property
    def rows(self) -> int:
        return self.spec.rows

    @property
    def cols(self) -> int:
        return self.spec.cols

    @property
    def pieces(self) -> list[Piece]:
        """All rows, in pieces that need little memory beside the planes."""
        together = len(self.weights)
        runs = [pieces(weight, _PIECE_ROWS, together) for weight in self.weights]
        if self.spec.alternating or all(len(rows) == 1 for rows in runs):
            sources = [tuple(zip(self.weights, rows, strict=True)) for rows in zip(*runs, strict=True)]
        else:
            sources = [((weight, rows),) for weight in self.weights for rows in pieces(weight, _PIECE_ROWS)]
        found, first = [], 0
        for part in sources:
            spec = replace(self.spec, tensors=tuple(TensorRows(len(rows), w.order) for w, rows in part))
            found.append(Piece(spec, first, part))
            first += spec.rows
        return found


@dataclass
class Product:
    """Matrices that multiply the same input, and the schedule of the kernel that decode multiplies them with. `name`:
    that of the first tensor, without the layer. With `experts`, one matrix that holds those of all experts; `shared`
    is that of an expert whose result is added to theirs."""

    matrices: Sequence[Matrix]
    experts: ChosenExperts | None = None
    shared: Matrix | None = None

    def __post_init__(self) -> None:
        first, n = self.matrices[0], self.experts.n if self.experts else 1
        self.name = first.weights[0].name
        shapes = tuple((m.layout, m.rows // n) for m in self.matrices)
        shared = (self.shared.layout, self.shared.cols) if self.shared else None
        self.stack = StackedMatrices(shapes, first.cols, self.experts, shared)
        self.planes = [plane for matrix in self.all_matrices for plane in matrix.planes]
        self.schedule = best_schedule(self.stack)

    @property
    def all_matrices(self) -> list[Matrix]:
        return [*self.matrices, *([self.shared] if self.shared else [])]

    @property
    def single_matrix(self) -> Matrix:
        """The matrix of a product that has one."""
        (matrix,) = self.matrices
        return matrix

    @property
    def n_blocks(self) -> int:
        """Thread blocks of the kernel."""
        return self.stack.n_blocks(self.schedule)


@dataclass
class Attention:
    """The weights and the cache of a layer's attention. `norms`: those of queries and of keys, one after the other;
    `wide`: they are over all heads together. `cache`: keys and values (`Heads.cache_planes`). `tables`: those of
    blocks, int32 (sequences, `Heads.table_size`), which all layers of a window share, if there are several
    sequences."""

    heads: Heads
    rope: int
    qkv: Product
    bias: Tensor | None
    norms: Tensor | None
    wide: bool
    sinks: Tensor | None
    o: Product
    o_bias: Tensor | None
    cache: list[Tensor]
    tables: Tensor | None

    @property
    def products(self) -> tuple[Product, ...]:
        """The products of the normed stream, and the one whose result is added to the stream."""
        return self.qkv, self.o


@dataclass
class DeltaNet:
    """The weights and the state of a gated delta net. `inputs`: the product with its input, of channels, gate, beta and
    alpha. `vectors`: those of the convolution, decay, decay_bias and the norm. `memory`: the state of all sequences
    (`DeltaHeads.memory_size`)."""

    heads: DeltaHeads
    inputs: Product
    vectors: list[Tensor]
    out: Product
    memory: Tensor

    @property
    def products(self) -> tuple[Product, ...]:
        """As `Attention.products`."""
        return self.inputs, self.out


@dataclass
class FeedForward:
    """The weights of a feed-forward layer. `gate_up` is one matrix with alternating rows if both have the same type."""

    gate_up: Product
    down: Product
    width: int
    activation: Activation

    @property
    def products(self) -> tuple[Product, ...]:
        """As `Attention.products`."""
        return self.gate_up, self.down


@dataclass
class Mixture:
    """The weights of a mixture of experts. With a shared expert, its gate is a row of the router, and the router's
    product has a second matrix: the shared expert's gate and up, whose rows alternate. `router_rows`: the router as
    prefill reads it, float32 (experts * dim,), or one row more.
    The biases of gate and up alternate as their rows do, float32 (experts * 2 * width,); those of down are float32
    (experts * dim,). `choices`: how often each expert was chosen, int32 (experts,)."""

    part: Experts
    router: Product
    router_rows: Tensor
    router_bias: Tensor | None
    gate_up: Product
    gate_up_bias: Tensor | None
    down: Product
    down_bias: Tensor | None
    choices: Tensor

    @property
    def products(self) -> tuple[Product, ...]:
        """As `Attention.products`."""
        return self.router, self.gate_up, self.down

    @property
    def width(self) -> int:
        return self.part.up.rows


@dataclass
class Layer:
    """A sublayer with the weights of its norms."""

    norm: NDArray[np.float32]
    mix: Attention | DeltaNet | FeedForward | Mixture
    post_norm: Tensor | None

    @property
    def input_bits(self) -> list[int]:
        """The prescales of the products of the normed stream (`StackedMatrices.prescale_bits`)."""
        return sorted({bits for product in self.mix.products[:-1] for bits in product.stack.prescale_bits})


@dataclass
class GPUModel:
    """All weights of a model and its KV cache. A tied output head is the same object as the embedding. `ropes`: the
    tables of cos and of sin of each, float32 (context, head_dim / 2). `temperatures`: the factors of queries by
    position, float32 (context,), if there is a temperature. `choices`: those of the mixtures (`Mixture.choices`)."""

    spec: ModelSpec
    layers: list[Layer]
    embedding: Product
    head: Product
    output_norm: NDArray[np.float32]
    ropes: list[tuple[Tensor, Tensor]]
    temperatures: list[Tensor]
    choices: DeviceCounts

    @property
    def products(self) -> list[Product]:
        heads = [self.head] if self.head is self.embedding else [self.embedding, self.head]
        return [product for layer in self.layers for product in layer.mix.products] + heads

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for product in self.products for matrix in product.all_matrices]

    @property
    def attention(self) -> list[Attention]:
        return [layer.mix for layer in self.layers if isinstance(layer.mix, Attention)]

    @property
    def deltas(self) -> list[DeltaNet]:
        return [layer.mix for layer in self.layers if isinstance(layer.mix, DeltaNet)]

    @property
    def last_cached(self) -> Attention | DeltaNet:
        """The last layer that keeps something of a token for the next ones."""
        return [layer.mix for layer in self.layers if isinstance(layer.mix, Attention | DeltaNet)][-1]

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


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Those that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True)
class CacheRoom:
    """What a KV cache has room for: `parallel` sequences of a `context` each, of which prefill takes up to `chunk`
    tokens at once, in the format `kv`. Several share pools of blocks, and `tables` are those of their blocks by window,
    made as layers need them."""

    context: int
    chunk: int
    parallel: int = 1
    kv: KVFormat = KVFormat.F16
    tables: dict[int, Tensor] = field(default_factory=dict)

    def pool(self, window: int) -> int:
        """Blocks of a layer's pool: those of all sequences, and one for each that is a copy."""
        kept = min(window + REWIND + self.chunk + BLOCK, self.context) if window else self.context
        return self.parallel * (-(-kept // BLOCK) + 1)


def allocate(
    weights: Weights, context: int, chunk: int, parallel: int = 1, kv: KVFormat = KVFormat.F16
) -> GPUModel:
    """A model with device memory for its matrices, to be filled by `GPUModel.fill`, and for `parallel` sequences of a
    context of `context` tokens, of which prefill takes up to `chunk` at once, in the format `kv`. Raises
    ModelFileError."""
    spec, room = weights.spec, CacheRoom(context, chunk, parallel, kv)
    choices = DeviceCounts([mix.count for mix in spec.experts])
    left = iter(choices.arrays)
    embedding = head = _product([spec.embedding])
    if not spec.is_tied:
        head = _product([spec.head])
    tables = [rope.tables(context, context) for rope in spec.ropes]
    return GPUModel(
        spec=spec,
        layers=[_layer(weights, sublayer, room, left) for sublayer in spec.sublayers],
        embedding=embedding,
        head=head,
        output_norm=weights.vector(spec.output_norm),
        ropes=[(to_device(cos), to_device(sin)) for cos, sin in tables],
        temperatures=[to_device(spec.temperature.factors(context))] if spec.temperature else [],
        choices=choices,
    )


def _layer(weights: Weights, sublayer: Sublayer, room: CacheRoom, choices: Iterator[Tensor]) -> Layer:
    assert sublayer.norm
    mix: Attention | DeltaNet | FeedForward | Mixture
    match sublayer.mix:
        case Attend() as part:
            mix = _attention(weights, part, room)
        case Delta() as part:
            mix = _delta_net(weights, part, room)
        case Dense() as part:
            mix = _feed_forward(part)
        case Experts() as part:
            mix = _mixture(weights, part, next(choices))
    return Layer(weights.vector(sublayer.norm), mix, _vector(weights, sublayer.post_norm))


def _vector(weights: Weights, vector: Vector | None) -> Tensor | None:
    return None if vector is None else to_device(weights.vector(vector))


def _attention(weights: Weights, part: Attend, room: CacheRoom) -> Attention:
    assert part.k and part.v
    window, is_pool = part.window if part.window < room.context else 0, room.parallel > 1
    sizes = (part.query_size, part.kv_size) if part.has_wide_norms else (part.head_dim, part.head_dim)
    norms = weights.joined_vectors(list(zip((part.q_norm, part.k_norm), sizes, strict=True)), 1.0)
    biases = (part.q_bias, part.query_size), (part.k_bias, part.kv_size), (part.v_bias, part.kv_size)
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
        gated=part.gate is not None,
    )
    if is_pool and window not in room.tables:
        room.tables[window] = device_zeros(room.parallel * heads.table_size, dtypes.int32)
    return Attention(
        heads=heads,
        rope=part.rope,
        qkv=_product([*([part.gate] if part.gate else []), part.q, part.k, part.v]),
        bias=None if bias is None else to_device(bias),
        norms=None if norms is None else to_device(norms),
        wide=part.has_wide_norms,
        sinks=_vector(weights, part.sinks),
        o=_product([part.o]),
        o_bias=_vector(weights, part.o_bias),
        cache=[device_zeros(n, dtype) for n, dtype in heads.cache_planes],
        tables=room.tables.get(window),
    )


def _delta_net(weights: Weights, part: Delta, room: CacheRoom) -> DeltaNet:
    heads = DeltaHeads(
        part.key_heads, part.value_heads, part.size, part.taps, weights.spec.eps, sequences=room.parallel
    )
    return DeltaNet(
        heads=heads,
        inputs=_product([part.qkv, part.gate, part.beta, part.alpha]),
        vectors=[to_device(weights.vector(vector)) for vector in part.vectors],
        out=_product([part.out]),
        memory=device_zeros(heads.memory_size),
    )


def _feed_forward(part: Dense) -> FeedForward:
    gate_up = _product([part.gate, part.up], alternate=part.gate.type == part.up.type)
    return FeedForward(gate_up, _product([part.down]), part.width, part.activation)


def _mixture(weights: Weights, part: Experts, choices: Tensor) -> Mixture:
    gate_up_bias = None
    if part.gate_bias and part.up_bias:
        biases = [weights.vector(bias) for bias in (part.gate_bias, part.up_bias)]
        gate_up_bias = to_device(np.stack(biases, axis=1).reshape(-1))
    chosen = ChosenExperts(part.used, part.count, False, gate_up_bias is not None, part.least_sum)
    added = ChosenExperts(part.used, part.count, added=True, bias=part.down_bias is not None)
    routers, shared_down = [part.router, *([part.shared_gate] if part.shared_gate else [])], None
    rows = [weights.read(weight, range(weight.rows)) for weight in routers]
    router = _product(routers)
    if part.shared:
        shared_gate_up = _matrices([part.shared.gate, part.shared.up], alternate=True)
        router = Product([*router.matrices, *shared_gate_up])
        (shared_down,) = _matrices([part.shared.down])
    return Mixture(
        part=part,
        router=router,
        router_rows=to_device(np.concatenate(rows).view(np.float32)),
        router_bias=_vector(weights, part.router_bias),
        gate_up=_product([part.gate, part.up], alternate=True, experts=chosen),
        gate_up_bias=gate_up_bias,
        down=Product(_matrices([part.down]), added, shared_down),
        down_bias=_vector(weights, part.down_bias),
        choices=choices,
    )


def _product(
    weights: Sequence[Weight], alternate: bool = False, experts: ChosenExperts | None = None
) -> Product:
    """The product of matrices, which follow each other (`_matrices`)."""
    return Product(_matrices(weights, alternate), experts)


def _matrices(weights: Sequence[Weight], alternate: bool = False) -> list[Matrix]:
    """Neighbours of the same type become one matrix; with `alternate` their rows alternate."""
    matrices = []
    for type, group in groupby(weights, lambda weight: weight.type):
        same_type = list(group)
        rows = tuple(TensorRows(weight.experts * weight.rows, weight.order) for weight in same_type)
        matrices.append(Matrix(same_type, MatrixSpec(WeightLayout(type), rows, same_type[0].cols, alternate)))
    return matrices
