"""Attention, as data: of all kinds that models have. For each, its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.description.sublayers import Operator, Roles, Vector, Weight


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
    give together, before the output projection. With `own_norms`, each head has weights of its own; `layer_norms` also
    take the mean off each head. `sinks`: for each head a score that joins those of the keys, unscaled, and whose value
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
    own_norms: bool = False
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
        return not self.own_norms and any(norm.size != self.head_dim for norm in norms)

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
