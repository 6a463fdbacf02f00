"""The description of a model: data from which everything else about it follows.

    x = embedding;  for each sublayer:  x += post_norm(mix(norm(x)));  logits = head(output_norm(x))

`engine.model.architectures` reads it from a file, and `engine.model.lower` makes the kernels of each device from it.
What is loaded, with which shapes, what a token reads and how large the cache is are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.formats.ggml_types import GGML_TYPES
from engine.formats.kv_format import KVFormat
from engine.formats.rope_order import HeadOrder

Activation = Literal["silu", "gelu", "swiglu_oai"]
"""Of a gate g and u: silu(g) * u, gelu(g) * u in the form with tanh, or gpt-oss's:
g * sigmoid(1.702 * g) * (u + 1) with g of at most 7 and u from -7 to 7."""


@dataclass(frozen=True)
class Weight:
    """A matrix (rows, cols) of the ggml type `type`: the rows of a tensor of the file from `first` on. `order`: the
    rows are those of heads, to be reordered. With `experts`, as many such matrices, one after the other."""

    tensor: str
    rows: int
    cols: int
    type: int
    first: int = 0
    order: HeadOrder | None = None
    experts: int = 1

    @property
    def name(self) -> str:
        """The tensor's name without the layer and the suffix: attn_q."""
        return self.tensor.removesuffix(".weight").rpartition(".")[2]

    @property
    def key(self) -> str:
        """Tells the matrix from all others of its file."""
        return f"{self.tensor}@{self.first}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        type = GGML_TYPES[self.type]
        return self.cols // type.block * type.block_bytes

    @property
    def n_bytes(self) -> int:
        return self.experts * self.rows * self.row_bytes


@dataclass(frozen=True)
class Vector:
    """Floats of a tensor of the file: `size` from `first` on, reordered if they are those of heads, times `factor`."""

    tensor: str
    size: int
    first: int = 0
    order: HeadOrder | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of heads with `pairs` pairs. `frequencies`: radians per position of the first pairs;
    the others do not turn. `long_frequencies`, if any, take their place in contexts of more than `short_context`
    tokens. The rotated elements are multiplied by `magnitude`."""

    pairs: int
    frequencies: tuple[float, ...] = ()
    long_frequencies: tuple[float, ...] = ()
    short_context: int = 0
    magnitude: float = 1.0

    def tables(self, length: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the rotations at positions 0 to `length` - 1, in a session that was opened with a
        context of `context` tokens: float32 (length, pairs) each."""
        is_long = self.long_frequencies and context > self.short_context
        frequencies = np.zeros(self.pairs)
        frequencies[: len(self.frequencies)] = self.long_frequencies if is_long else self.frequencies
        angles = np.arange(length)[:, None] * frequencies
        size = np.where(np.arange(self.pairs) < len(self.frequencies), self.magnitude, 1.0)
        return (np.cos(angles) * size).astype(np.float32), (np.sin(angles) * size).astype(np.float32)


@dataclass(frozen=True)
class Temperature:
    """Queries grow with their position: by 1 + `slope` * ln(floor(position / length) + 1)."""

    slope: float
    length: int

    def factors(self, length: int) -> NDArray[np.float32]:
        """The factors at positions 0 to `length` - 1, float32 (length,)."""
        return (1 + self.slope * np.log(np.arange(length) // self.length + 1)).astype(np.float32)


@dataclass(frozen=True)
class Attend:
    """Attention. `heads` query heads share `kv_heads` heads of keys and values, of `head_dim` elements each. The norms
    of queries and keys are over a head (head_dim weights), or over all heads together. `rope` is an index in
    `ModelSpec.ropes`. Scores are multiplied by `scale`. With a `window`, a query at position p attends to the keys at
    p - window + 1 to p; 0 means to all. `sinks`: for each head a score
    that joins those of the keys, unscaled, and whose value is zero."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_bias: Vector | None
    k_bias: Vector | None
    v_bias: Vector | None
    o_bias: Vector | None
    q_norm: Vector | None
    k_norm: Vector | None
    heads: int
    kv_heads: int
    head_dim: int
    rope: int
    scale: float
    window: int = 0
    sinks: Vector | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def query_size(self) -> int:
        """Elements of a token's queries, over all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys, over all heads; as many as of its values."""
        return self.kv_heads * self.head_dim

    @property
    def has_wide_norms(self) -> bool:
        """Whether queries or keys are normed over all heads together."""
        return any(norm and norm.size != self.head_dim for norm in (self.q_norm, self.k_norm))

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.q, self.k, self.v, self.o

    @property
    def vectors(self) -> tuple[Vector, ...]:
        biases = self.q_bias, self.k_bias, self.v_bias, self.o_bias
        all_vectors = *biases, self.q_norm, self.k_norm, self.sinks
        return tuple(vector for vector in all_vectors if vector)


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer: down(activation(gate x) * up x)."""

    gate: Weight
    up: Weight
    down: Weight
    activation: Activation

    @property
    def width(self) -> int:
        return self.up.rows

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.gate, self.up, self.down

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return ()


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which are feed-forward layers. The router gives each expert a probability, a softmax of
    `router` x. The `used` most probable ones are computed, and their results are added, each times its probability; if
    they are `renormalised`, divided by the sum of these. The biases of all experts are one after the other."""

    router: Weight
    router_bias: Vector | None
    gate: Weight
    up: Weight
    down: Weight
    gate_bias: Vector | None
    up_bias: Vector | None
    down_bias: Vector | None
    used: int
    renormalised: bool
    activation: Activation

    @property
    def count(self) -> int:
        return self.down.experts

    @property
    def least_sum(self) -> float | None:
        """What the probabilities of the chosen experts are divided by at least, if they are divided by their sum."""
        return MIN_PROBABILITY if self.renormalised else None

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.router, self.gate, self.up, self.down

    @property
    def vectors(self) -> tuple[Vector, ...]:
        biases = self.router_bias, self.gate_bias, self.up_bias, self.down_bias
        return tuple(bias for bias in biases if bias)


MIN_PROBABILITY = 6.1e-5
"""What the probabilities of chosen experts are divided by at least: build_moe_ffn in src/llama-graph.cpp."""


@dataclass(frozen=True)
class Sublayer:
    """What the residual stream passes through: x += post_norm(mix(norm(x))). A norm that is None is left out."""

    norm: Vector | None
    mix: Attend | Dense | Experts
    post_norm: Vector | None


@dataclass(frozen=True)
class ModelSpec:
    """A model. Sizes are in elements: `dim` of the residual stream, `vocab` of the vocabulary. `eps` is that of the RMS
    norms, and `stream_eps` that of norms of the residual stream. Logits are softcap * tanh(logits / softcap) if there
    is one."""

    architecture: str
    name: str
    dim: int
    vocab: int
    trained_context: int
    embedding: Weight
    embedding_scale: float
    sublayers: tuple[Sublayer, ...]
    output_norm: Vector
    head: Weight
    ropes: tuple[Rope, ...]
    eps: float
    stream_eps: float
    softcap: float = 0.0
    temperature: Temperature | None = None

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the output head too."""
        return self.head == self.embedding

    @property
    def is_float32(self) -> bool:
        """Whether all matrices are float32."""
        return all(GGML_TYPES[weight.type].name == "F32" for weight in self.weights())

    @property
    def attention(self) -> list[Attend]:
        return [sublayer.mix for sublayer in self.sublayers if isinstance(sublayer.mix, Attend)]

    @property
    def feed_forward(self) -> list[Dense]:
        return [sublayer.mix for sublayer in self.sublayers if isinstance(sublayer.mix, Dense)]

    @property
    def experts(self) -> list[Experts]:
        return [sublayer.mix for sublayer in self.sublayers if isinstance(sublayer.mix, Experts)]

    def weights(self) -> Iterator[Weight]:
        """All matrices, a tied head once."""
        yield self.embedding
        if not self.is_tied:
            yield self.head
        for sublayer in self.sublayers:
            yield from sublayer.mix.weights

    def vectors(self) -> Iterator[Vector]:
        """All vectors."""
        for sublayer in self.sublayers:
            yield from filter(None, (sublayer.norm, sublayer.post_norm))
            yield from sublayer.mix.vectors
        yield self.output_norm

    @property
    def vector_bytes(self) -> int:
        """Bytes of all vectors, as float32."""
        return sum(4 * vector.size for vector in self.vectors())

    # --- figures ---------------------------------------------------------------------------------------

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads: all, but of experts only the chosen ones, and of an embedding that
        is not the head as well one row."""
        n_bytes = sum(weight.n_bytes for weight in self.weights()) + self.vector_bytes
        for mix in self.experts:
            for weight in (mix.gate, mix.up, mix.down):
                n_bytes -= weight.n_bytes * (mix.count - mix.used) // mix.count
        return n_bytes if self.is_tied else n_bytes - self.embedding.n_bytes + self.embedding.row_bytes

    @property
    def idle_parameters(self) -> int:
        """How many of the weights are of experts that a token does not choose."""
        return sum(
            (mix.count - mix.used) * weight.rows * weight.cols
            for mix in self.experts
            for weight in (mix.gate, mix.up, mix.down)
        )

    @property
    def window(self) -> int:
        """The sliding window of the layers that have one, in tokens; 0 if none has."""
        return max((attend.window for attend in self.attention), default=0)

    def kv_bytes_per_token(self, windowed: bool, kv: KVFormat = KVFormat.F16) -> int:
        """Bytes that a token takes in the KV cache of the layers with or without a window. In place of float16 it is
        float32 if all matrices are (but float16 in the kernels of GPUs)."""
        wider = 2 if self.is_float32 and not kv.is_quantized else 1
        return sum(2 * kv.bytes(a.kv_size) * wider for a in self.attention if bool(a.window) == windowed)

    def parts(self) -> Iterator[str]:
        """What the model needs beyond a llama's parts, in words: a target may lack it."""
        attention = self.attention
        if any(sublayer.norm is None for sublayer in self.sublayers):
            yield "layers without a norm before them"
        if any(a.has_wide_norms for a in attention):
            yield "norms over all heads"
        if any(a.o_bias for a in attention):
            yield "a bias of attention's output"
        if self.softcap:
            yield "a soft cap of the logits"
        if self.stream_eps != self.eps and any(sublayer.post_norm for sublayer in self.sublayers):
            yield "a residual multiplier with norms after layers"
        if any(a.sinks for a in attention):
            yield "attention sinks"
        if self.experts:
            yield "experts"
        if any(mix.gate.type != mix.up.type for mix in self.experts):
            yield "experts whose gate and up differ in type"
        if any(a.window for a in attention):
            yield "sliding windows"
        if any(sublayer.post_norm for sublayer in self.sublayers):
            yield "norms after layers"
        if any(dense.activation == "gelu" for dense in self.feed_forward):
            yield "GELU"
        if self.temperature:
            yield "a temperature of attention"
        if self.embedding_scale != 1:
            yield "a scaled embedding"
        if len(self.ropes) > 1:
            yield "several rotary embeddings"
        if any(not math.isclose(a.scale, a.head_dim**-0.5) for a in attention):
            yield "a scale of attention"
        if any(a.shape != attention[0].shape for a in attention):
            yield "attention of several shapes"
