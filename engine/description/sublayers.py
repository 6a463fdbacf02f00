"""What a model's sublayers compute, as data: attention, feed-forward layers, mixtures of experts.

`engine.description.spec` puts a model together from them. Each says which matrices and vectors of the file it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, TypeVar

from engine.formats.ggml_types import TYPES
from engine.formats.rope_order import HeadOrder
from engine.protocol.events import KernelRole

T = TypeVar("T")
Scoring = Literal["softmax", "sigmoid"]


class SiluLimits(NamedTuple):
    """Of a gate g and u: silu(g) * u with g of at most `gate`, and u from -`up` to `up`."""

    gate: float
    up: float


Activation = Literal["silu", "gelu", "swiglu_oai", "relu", "relu2"] | SiluLimits
"""Of a gate g and u: silu(g) * u, also within limits, gelu(g) * u in the form with tanh, or gpt-oss's:
g * sigmoid(1.702 * g) * (u + 1) with g of at most 7 and u from -7 to 7. relu(g) is max(g, 0), and relu2(g) its
square."""


@dataclass(frozen=True)
class Weight:
    """A matrix (rows, cols) of the ggml type `type`: the rows of a tensor of the file from `first` on. `order`: the
    rows are those of heads, to be reordered. With `experts`, as many such matrices, one after the other. With `every`,
    the rows of these are the first `run` of each `every` rows of the tensor, from `first` on. With `of_cols`, the
    tensor has so many columns, of which these are `cols` from `first_col` on, whole blocks.

    With a `scale`, a tensor of one number or of one for each expert, the weights are multiplied by it. Those of a
    `blank` one are zeros, whatever the tensor has.

    If it is `transposed`, the matrix of expert i is, as floats of this type, the transpose of the `cols` rows of the
    tensor from `first` + i * `every` on."""

    tensor: str
    rows: int
    cols: int
    type: int
    first: int = 0
    order: HeadOrder | None = None
    experts: int = 1
    every: int = 0
    run: int = 0
    first_col: int = 0
    of_cols: int = 0
    transposed: bool = False
    scale: str = ""
    blank: bool = False

    @property
    def name(self) -> str:
        """The tensor's name without the layer and the suffix: attn_q."""
        return self.tensor.removesuffix(".weight").rpartition(".")[2]

    @property
    def key(self) -> str:
        """Tells the matrix from all others of its file."""
        others = (f",{self.first_col}" if self.first_col else "") + ",blank" * self.blank
        return f"{self.tensor}@{self.first}{others}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is read from the file (`engine.formats.widening`)."""
        return self._bytes(self.cols)

    @property
    def tensor_row_bytes(self) -> int:
        """Bytes of the tensor's row that a row of these is a part of."""
        return self._bytes(self.of_cols or self.cols)

    @property
    def row_start(self) -> int:
        """How many bytes of the tensor's row come before that part."""
        return self._bytes(self.first_col)

    def _bytes(self, cols: int) -> int:
        type = TYPES[self.type]
        return cols // type.block * type.block_bytes

    @property
    def n_bytes(self) -> int:
        return self.experts * self.rows * self.row_bytes


@dataclass(frozen=True)
class Vector:
    """Floats of a tensor of the file: `size` from `first` on, reordered if they are those of heads, times `factor`.
    Without a tensor ("") they are ones, times that."""

    tensor: str
    size: int
    first: int = 0
    order: HeadOrder | None = None
    factor: float = 1.0


Roles = dict[KernelRole, tuple[Weight | None, ...]]


@dataclass(frozen=True)
class Operator:
    """What a sublayer computes. All that it needs of the file is among its fields, or among those of its parts.
    `words`: what users read of it."""

    words: ClassVar[str]

    @property
    def roles(self) -> Roles:
        """Its matrices, by the role of the kernels that multiply by them."""
        return {}

    @cached_property  # a start asks a hundred times
    def parts(self) -> tuple[Operator, ...]:
        """The layers that it consists of."""
        return self._fields(Operator)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return *self._own_weights, *(weight for part in self.parts for weight in part.weights)

    @property
    def row_elements(self) -> int:
        """Elements of the rows that its own matrices make of a token."""
        return sum(weight.rows for weight in self._own_weights)

    @property
    def state_bytes(self) -> int:
        """Bytes of its recurrent state of a sequence; 0 if it has none."""
        return 0

    @property
    def is_keeping(self) -> bool:
        """Whether it keeps something of each token for the next ones: keys and values, or a state."""
        return self.state_bytes > 0

    @property
    def _own_weights(self) -> Iterator[Weight]:
        return (weight for weights in self.roles.values() for weight in weights if weight)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return *self._fields(Vector), *(vector for part in self.parts for vector in part.vectors)

    def _fields(self, kind: type[T]) -> tuple[T, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, kind))


@dataclass(frozen=True)
class Indexer(Operator):
    """Chooses what attention attends to: of the whole blocks of `block` tokens, which begin at multiples of that, the
    `top` / block best ones, of equal ones the first, and all tokens after the last whole block. So with `top` tokens or
    fewer it is all. The key of a block is norm(the mean of `k` x over its tokens), rotated as its first token; a query
    is norm(`q` x), in `heads` heads of `size` elements, rotated. A block is as good as the sum over the heads of what
    of their products with its key is above 0. `rope`: as that of attention."""

    q: Weight
    k: Weight
    q_norm: Vector
    k_norm: Vector
    heads: int
    size: int
    rope: int
    top: int
    block: int
    words = "attention to chosen tokens"

    @property
    def roles(self) -> Roles:
        return {"QKV projection": (self.q, self.k)}


@dataclass(frozen=True)
class Attention(Operator):
    """Attention. `heads` query heads share `kv_heads` heads of keys and values, of `head_dim` elements each. The norms
    of queries and keys are over a head (head_dim weights), or over all heads together; with `rotates_first` they come
    after the rotation, and are over a head. `rope` is an index in `ModelSpec.ropes`. Scores are multiplied by `scale`,
    and with a `softcap` they are softcap * tanh(scores / softcap). With a `window`, a query at position p attends to
    the keys at p - window + 1 to p; 0 means to all. If windows are `chunked`, it attends to those from the last
    multiple of the window on. Queries that are not `tempered` do not grow with their position
    (`ModelSpec.temperature`). With `slopes`, one for each head, slope * distance of the two tokens is taken off a score
    (ALiBi). With a `limit`, queries, keys and values are cut to -limit to limit. A `result_norm` norms what all heads
    give together, before the output projection. If norms are `layer_norms`, they take the mean off each head, and each
    head has weights of its own. `sinks`: for each head a score that joins those of the keys, unscaled, and whose value
    is zero. `gate`: the result is multiplied by sigmoid(gate x) before the output projection, or by softplus(gate x) if
    it is so `gating`; if that has a number for each head, by those. An `indexer` chooses the tokens to attend to.
    Values are times `value_factor`.

    With `sees_pictures`, a picture's tokens attend also to those after them in the same picture. If it goes
    `both_ways`, all tokens attend to those after them, with a window to as many as before them.

    Without `v`, the keys before norm and rotation are the values. With `has_normed_values`, values are normed over a
    head, without a weight. `cache_of`: an index in `ModelSpec.attention` of a layer whose keys and values it reads; it
    has none of its own."""

    q: Weight
    k: Weight | None
    v: Weight | None
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
    gate: Weight | None = None
    cache_of: int | None = None
    has_normed_values: bool = False
    sees_pictures: bool = False
    both_ways: bool = False
    softcap: float = 0.0
    rotates_first: bool = False
    chunked: bool = False
    tempered: bool = True
    slopes: tuple[float, ...] = ()
    limit: float = 0.0
    layer_norms: bool = False
    result_norm: Vector | None = None
    gating: Literal["sigmoid", "softplus"] = "sigmoid"
    indexer: Indexer | None = None
    value_factor: float = 1.0
    words = "attention"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a head's values, at most `head_dim`, which they have room for in the cache."""
        return self.o.cols // self.heads

    @property
    def has_plain_values(self) -> bool:
        """Whether values are as long as keys, and multiplied by nothing."""
        return self.value_dim == self.head_dim and self.value_factor == 1

    @property
    def query_size(self) -> int:
        """Elements of a token's queries, over all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys, over all heads; as many as of its values."""
        return self.kv_heads * self.head_dim

    @property
    def is_keeping(self) -> bool:
        return self.cache_of is None

    @property
    def looks_ahead(self) -> bool:
        """Whether tokens may attend to those after them, in prompts."""
        return self.both_ways or self.sees_pictures

    @property
    def scales_heads(self) -> bool:
        """Whether it has a gate of another kind than a sigmoid for each element of the result."""
        return self.gate is not None and (self.gating != "sigmoid" or self.gate.rows != self.query_size)

    @property
    def has_norms_over_heads(self) -> bool:
        """Whether queries or keys are normed over all heads together."""
        norms = (norm for norm in (self.q_norm, self.k_norm) if norm)
        return not self.layer_norms and any(norm.size != self.head_dim for norm in norms)

    @property
    def roles(self) -> Roles:
        return {"QKV projection": (self.q, self.gate, self.k, self.v), "attention output": (self.o,)}


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Attention whose heads share one vector of each token as keys and values (multi-head latent attention, DeepSeek
    V2): `latent` elements, which are norm(`k` x) with `latent_norm`, and then `rotated` ones, `k_rotated` x, which are
    rotated in the keys. So kv_heads is 1, and head_dim is both together.

    A head's query is such a vector too: its latent elements are the product of its matrix of `of_keys` (latent, plain)
    and `plain` elements, those of `q` y; the rotated ones are of `q_rotated` y. y is norm(`q_down` x) with
    `q_down_norm`, or without these x. A head's result is the product of its matrix of `of_values` (values, latent) and
    the latent elements of what it attends to, times its number of sigmoid(`gate` x) if there is a gate."""

    k: Weight
    q_rotated: Weight
    k_rotated: Weight
    of_keys: Weight
    of_values: Weight
    latent_norm: Vector
    q_down: Weight | None
    q_down_norm: Vector | None
    words = "latent attention"

    @property
    def latent(self) -> int:
        return self.of_values.cols

    @property
    def plain(self) -> int:
        return self.of_keys.cols

    @property
    def rotated(self) -> int:
        return self.k_rotated.rows

    @property
    def values(self) -> int:
        """Elements of a head's result."""
        return self.of_values.rows

    @property
    def row_elements(self) -> int:
        heads = (self.heads - 1) * (self.of_keys.rows + self.of_values.rows)
        return super().row_elements + heads

    @property
    def roles(self) -> Roles:
        inputs = self.q_down, self.q, self.q_rotated, self.k, self.k_rotated, self.of_keys, self.gate
        return {"QKV projection": inputs, "attention output": (self.of_values, self.o)}


@dataclass(frozen=True)
class Dense(Operator):
    """A feed-forward layer: down(activation(gate x) * up x), or without a gate down(activation(up x)). Products may
    have biases. With `sparsity`, of a token's gates g only what is above mean(g) + sparsity * deviation(g) counts:
    max(g - that, 0) takes the place of g. A deviation is divided by the number of gates less one. Without a gate, a
    `curve` (n, p, b, e) may take the place of the activation (xIELU): p * u * u + b * u of u above 0, else
    n * (exp(min(u, e)) - 1 - u) + b * u. A `hidden_norm` norms what the product `down` reads."""

    gate: Weight | None
    up: Weight
    down: Weight
    activation: Activation
    gate_bias: Vector | None = None
    up_bias: Vector | None = None
    down_bias: Vector | None = None
    sparsity: float = 0.0
    curve: tuple[float, ...] = ()
    hidden_norm: Vector | None = None
    words = "feed-forward layers"

    @property
    def width(self) -> int:
        return self.up.rows

    @property
    def roles(self) -> Roles:
        return {"FFN gate+up": (self.gate, self.up), "FFN down": (self.down,)}


@dataclass(frozen=True)
class Experts(Operator):
    """A mixture of experts, which are feed-forward layers. The router gives each expert a probability, the softmax
    (`scoring`) or the sigmoid of `router` x. The `used` most probable ones are computed, and their results are added,
    each times its probability; if they are `renormalised`, divided by the sum of these; and times `factor`. The biases
    of all experts are one after the other. `scales`: a number for each expert, by which its result is multiplied. A
    `shared` layer computes every token; its result times sigmoid(`shared_gate` x) is added, with `shared_gate` (1,
    dim); without that, all of it. If it `routes_before`, the router reads the residual stream as the sublayer before
    this one did, without a norm. With `weighed_inputs`, which has one expert used, what the expert reads is times its
    probability, in place of its result (llama4).

    `choice_bias`: a number for each expert, added to its probability for the choice alone. With more than one of the
    `groups`, equal parts of the experts, only those of the `used_groups` best ones are chosen; the two best experts of
    a group, added, tell how good it is."""

    router: Weight
    router_bias: Vector | None
    gate: Weight | None
    up: Weight
    down: Weight
    gate_bias: Vector | None
    up_bias: Vector | None
    down_bias: Vector | None
    used: int
    renormalised: bool
    activation: Activation
    scales: Vector | None = None
    shared: Dense | None = None
    shared_gate: Weight | None = None
    scoring: Scoring = "softmax"
    choice_bias: Vector | None = None
    factor: float = 1.0
    groups: int = 1
    used_groups: int = 1
    weighed_inputs: bool = False
    routes_before: bool = False
    words = "mixtures of experts"

    @property
    def count(self) -> int:
        return self.down.experts

    @property
    def row_elements(self) -> int:
        return self.router.rows + self.used * sum(weight.rows for weight in self.matrices)

    @property
    def firsts(self) -> list[tuple[Weight, Vector | None]]:
        """The gates, unless the layers have none, and the ups, with their biases."""
        return [
            (weight, bias)
            for weight, bias in ((self.gate, self.gate_bias), (self.up, self.up_bias))
            if weight
        ]

    @property
    def matrices(self) -> list[Weight]:
        """The matrices of the experts."""
        return [*(weight for weight, _ in self.firsts), self.down]

    @property
    def is_plain(self) -> bool:
        """Whether the experts with the largest logits are chosen, and softmax weighs them."""
        changes = self.scoring != "softmax", self.choice_bias, self.factor != 1, self.groups > 1
        return not any(changes)

    @property
    def least_sum(self) -> float | None:
        """What the probabilities of the chosen experts are divided by at least, if they are divided by their sum."""
        return MIN_PROBABILITY if self.renormalised else None

    @property
    def roles(self) -> Roles:
        return {
            "router": (self.router, self.shared_gate),
            "experts gate+up": tuple(weight for weight, _ in self.firsts),
            "experts down": (self.down,),
        }


MIN_PROBABILITY = 6.1e-5
"""What the probabilities of chosen experts are divided by at least: build_moe_ffn in src/llama-graph.cpp."""


@dataclass(frozen=True)
class SideBySide(Operator):
    """A feed-forward layer and a mixture of experts side by side. Its sublayer has no norm, because each has its own:
    dense_post_norm(dense(dense_norm(x))) + experts_post_norm(experts(experts_norm(x))). The router reads another norm
    of x, whose weights are `router_scale`."""

    dense: Dense
    dense_norm: Vector
    dense_post_norm: Vector
    experts: Experts
    experts_norm: Vector
    experts_post_norm: Vector
    router_scale: Vector
    words = "experts beside a feed-forward layer"


@dataclass(frozen=True)
class LayerEmbedding(Operator):
    """proj(gelu(gate x) * e[layer]): what `ModelSpec.layer_embeddings` give a layer. Its sublayer has no norm."""

    gate: Weight
    proj: Weight
    layer: int
    words = "embeddings of layers"

    @property
    def roles(self) -> Roles:
        return {"FFN gate+up": (self.gate,), "FFN down": (self.proj,)}
