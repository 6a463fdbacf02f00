"""The layers of a model as the GPU's kernels read them: products, biases, the weights of norms, caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.kernels.gpu.delta_net import DeltaHeads
from engine.kernels.gpu.kv_cache import Heads
from engine.model.lower.gpu_matrices import Product
from engine.model.mixes import Activation, Experts


@dataclass
class Attention:
    """The weights and the cache of a layer's attention. `norms`: those of queries and of keys, one after the other;
    `wide`: they are over all heads together. `cache`: keys and values (`Heads.cache_planes`), those of another layer if
    this one stores nothing. `tables`: those of
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

    @property
    def is_storing(self) -> bool:
        """Whether the cache is the layer's own."""
        return self.heads.stored != "nothing"


@dataclass
class DeltaNet:
    """The weights and the state of a gated delta net. `inputs`: the product with its input, of channels, gate, beta and
    alpha. `vectors`: conv (those of the convolution), decay, decay_bias and norm. `memory`: the state of all sequences
    (`DeltaHeads.memory_size`)."""

    heads: DeltaHeads
    inputs: Product
    vectors: dict[str, Tensor]
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
    prefill reads it, float32 (experts * dim,), or one row more. The biases of gate and up alternate as their rows do,
    float32 (experts * 2 * width,); those of down are float32 (experts * dim,). `scales`: what the experts' results are
    multiplied by, float32 (experts,). `choices`: how often each expert was chosen, int32 (experts,)."""

    part: Experts
    router: Product
    router_rows: Tensor
    router_bias: Tensor | None
    gate_up: Product
    gate_up_bias: Tensor | None
    down: Product
    down_bias: Tensor | None
    scales: Tensor | None
    choices: Tensor

    @property
    def products(self) -> tuple[Product, ...]:
        """As `Attention.products`."""
        return self.router, self.gate_up, self.down

    @property
    def width(self) -> int:
        return self.part.up.rows


@dataclass
class SideBySide:
    """A feed-forward layer and a mixture of experts side by side, and the weights of their norms: those before them and
    before the router, and those of their results. In decode, one kernel has the router beside the feed-forward layer's
    gate and up (`first`), unless these differ in type, and one has both downs (`down`)."""

    dense: FeedForward
    dense_norm: NDArray[np.float32]
    dense_post_norm: Tensor
    experts: Mixture
    experts_norm: NDArray[np.float32]
    experts_post_norm: Tensor
    router_norm: NDArray[np.float32]
    first: Product | None
    down: Product

    @property
    def products(self) -> tuple[Product, ...]:
        """Those of a decode step."""
        first = [self.first] if self.first else [self.experts.router, self.dense.gate_up]
        return *first, self.experts.gate_up, self.down


@dataclass
class Embedded:
    """The weights of what the embeddings of a layer, the `layer`-th, are added through."""

    gate: Product
    proj: Product
    layer: int

    @property
    def products(self) -> tuple[Product, ...]:
        """As `Attention.products`."""
        return self.gate, self.proj


Mix = Attention | DeltaNet | FeedForward | Mixture | SideBySide | Embedded


@dataclass(frozen=True)
class Input:
    """What a product reads: the stream times the weight of a norm and times a prescale
    (`StackedMatrices.prescale_bits`)."""

    norm: NDArray[np.float32]
    bits: int

    @property
    def key(self) -> tuple[int, int]:
        return id(self.norm), self.bits


def inputs_of(norm: NDArray[np.float32], *products: Product) -> list[Input]:
    """The inputs of products after a norm."""
    bits = {bits for product in products for bits in product.stack.prescale_bits}
    return [Input(norm, b) for b in sorted(bits)]


@dataclass
class Layer:
    """A sublayer with the weights of its norms. If it has none before it, these are ones, and the stream is not
    normed. `scale`: float32 (1,), what the stream is multiplied by after it."""

    norm: NDArray[np.float32]
    is_normed: bool
    mix: Mix
    post_norm: Tensor | None
    scale: Tensor | None

    @property
    def inputs(self) -> list[Input]:
        """What the products of the stream read."""
        if isinstance(self.mix, SideBySide):
            m, experts = self.mix, self.mix.experts
            of_dense, of_experts = (
                inputs_of(m.dense_norm, m.dense.gate_up),
                inputs_of(m.router_norm, experts.router),
            )
            return [*of_dense, *of_experts, *inputs_of(m.experts_norm, experts.gate_up)]
        return inputs_of(self.norm, *self.mix.products[:-1])


@dataclass
class LayerTables:
    """The weights of the embeddings of layers (`engine.model.spec.LayerEmbeddings`). `plain`: ones."""

    table: Product
    projection: Product
    norm: Tensor
    size: int
    layers: int
    plain: NDArray[np.float32]

    @property
    def inputs(self) -> list[Input]:
        return inputs_of(self.plain, self.projection)
