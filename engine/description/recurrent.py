"""Sublayers that keep a state of each sequence in place of keys and values, as data: gated delta nets, short
convolutions, Mamba and Mamba 2 layers."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from engine.description.sublayers import Operator, Roles, Vector, Weight


@dataclass(frozen=True)
class Recurrent(Operator):
    """Keeps a state of each sequence in place of keys and values, which does not grow: float32, zeros at its begin."""

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts of a sequence's state."""

    @property
    def state_bytes(self) -> int:
        return 4 * sum(map(math.prod, self.state_shapes))


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """A short convolution. `inputs` x is, for each token, b, c and v, of `channels` elements each. The channels of b v
    pass a causal convolution over the last `taps` tokens, the last tap for the token itself; the result is
    `out` (c * that). A sequence keeps the last taps - 1 inputs of the convolution."""

    inputs: Weight
    out: Weight
    conv: Vector
    """Channel by channel its taps."""
    channels: int
    taps: int
    words = "short convolutions"

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.taps - 1, self.channels),)

    @property
    def roles(self) -> Roles:
        return {"QKV projection": (self.inputs,), "attention output": (self.out,)}


@dataclass(frozen=True)
class DeltaNet(Recurrent):
    """A gated delta net. `qkv` x is, for each token: `key_heads` queries and as many keys, then `value_heads` values,
    of `size` elements each. Each of these channels passes a causal convolution over the last `taps` tokens, the last
    tap for the token itself, and then SiLU. Queries and keys are divided by their length, sqrt(sum of squares + eps);
    queries are multiplied by size ** -0.5. The value head j has the query and the key of head j mod key_heads; if
    neighbours share them (`shares_in_turn` is false), of head j * key_heads // value_heads. `qkv` may be several
    matrices, one after the other.

    beta = sigmoid(`beta` x) and decay = exp(`decay` * softplus(`alpha` x + `decay_bias`)) are a number for each value
    head. With a state S (size keys, size values) for each value head, a token computes, in this order:
    S *= decay;  S += k (beta * (v - S^T k))^T;  y = S^T q.  The result is `out` (norm(y) * silu(`gate` x)), normed over
    a head, or with the sigmoid of that, by `gating`.

    A sequence keeps the S, and the last taps - 1 inputs of the convolution."""

    qkv: tuple[Weight, ...]
    gate: Weight
    beta: Weight
    alpha: Weight
    out: Weight
    conv: Vector
    """Channel by channel its taps."""
    decay: Vector
    decay_bias: Vector
    norm: Vector
    key_heads: int
    value_heads: int
    size: int
    taps: int
    shares_in_turn: bool = True
    gating: Literal["silu", "sigmoid"] = "silu"
    words = "gated delta nets"

    @property
    def channels(self) -> int:
        """The rows of `qkv`."""
        return (2 * self.key_heads + self.value_heads) * self.size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.value_heads, self.size, self.size), (self.taps - 1, self.channels)

    @property
    def roles(self) -> Roles:
        inputs = *self.qkv, self.gate, self.beta, self.alpha
        return {"QKV projection": inputs, "attention output": (self.out,)}


@dataclass(frozen=True)
class KeyedDeltaNet(Recurrent):
    """A delta net as `DeltaNet`, of `heads` heads of queries, keys and values, in which each element of a key has a
    decay of its own (Kimi Delta Attention). `convs`: the taps of queries, of keys and of values.

    The logarithms of the decays are `decay` * softplus(f + `decay_bias`), where f is `alphas` x, one matrix after the
    other, and `decay` a number for each head; with a `bound` they are bound * sigmoid(decay * (f + decay_bias)). With
    a state S (size keys, size values) for each head, a token computes, in this order: S *= decays (of rows);
    S += k (beta * (v - S^T k))^T;  y = S^T q.  The result is `out` (norm(y) * sigmoid(`gates` x)), normed over a head,
    with one matrix of `gates` after the other."""

    qkv: tuple[Weight, ...]
    gates: tuple[Weight, ...]
    beta: Weight
    alphas: tuple[Weight, ...]
    out: Weight
    convs: tuple[Vector, ...]
    """Channel by channel the taps."""
    decay: Vector
    decay_bias: Vector
    norm: Vector
    heads: int
    size: int
    taps: int
    bound: float = 0.0
    words = "delta nets with decays of keys"

    @property
    def width(self) -> int:
        """Elements of queries, over all heads."""
        return self.heads * self.size

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return *super().vectors, *self.convs

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.heads, self.size, self.size), (self.taps - 1, 3 * self.width)

    @property
    def roles(self) -> Roles:
        inputs = *self.qkv, *self.gates, self.beta, *self.alphas
        return {"QKV projection": inputs, "attention output": (self.out,)}


@dataclass(frozen=True)
class Mamba(Recurrent):
    """A Mamba 2 layer. `channels` x is, for each token: x of `heads` heads of `head_dim` elements, then B and then C of
    `groups` groups of `size` elements. Each of these channels passes a causal convolution over the last `taps` tokens,
    the last tap for the token itself, with `conv_bias`, and then SiLU. The head j has the B and the C of the group
    j * groups // heads.

    dt = softplus(`step` x + `step_bias`) is a number for each head, and so is exp(`decay` * dt). With a state
    S (size, head_dim) for each head, a token computes S = exp(decay * dt) S + B (dt x)^T;  y = S^T C + `skip` x.  The
    result is `out` norm(y * silu(`gate` x)), normed over the elements of a group if there is a `norm`. A sequence keeps
    the S, and the last taps - 1 inputs of the convolution."""

    gate: Weight
    channels: Weight
    step: Weight
    out: Weight
    conv: Vector
    """Channel by channel its taps."""
    conv_bias: Vector | None
    decay: Vector
    step_bias: Vector
    skip: Vector
    norm: Vector | None
    heads: int
    groups: int
    head_dim: int
    size: int
    taps: int
    words = "Mamba 2 layers"

    @property
    def width(self) -> int:
        """Elements of x, over all heads."""
        return self.heads * self.head_dim

    @property
    def row_elements(self) -> int:
        """Also the channels after the convolution, and y, of which a GPU has a sum for each 32 elements of a state."""
        return super().row_elements + self.channels.rows + -(-self.size // 32) * self.width

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.heads, self.size, self.head_dim), (self.taps - 1, self.channels.rows)

    @property
    def roles(self) -> Roles:
        inputs = self.gate, self.channels, self.step
        return {"QKV projection": inputs, "attention output": (self.out,)}


@dataclass(frozen=True)
class SelectiveScan(Recurrent):
    """A Mamba layer (the first kind). `channels` x is, for each token, `width` channels. Each passes a causal
    convolution over the last `taps` tokens, the last tap for the token itself, with `conv_bias`, and then SiLU: u.
    B = `b` u, C = `c` u and `low` u are normed if there are norms, and dt = softplus(`step` low u + `step_bias`) is a
    number for each channel.

    With a state S (size, width), a token computes S = exp(decay * dt) S + B (dt u)^T;  y = S^T C + `skip` u, where
    `decay` has a number for each element of S, channel by channel. The result is `out` (y * silu(`gate` x)). A sequence
    keeps the S, and the last taps - 1 inputs of the convolution. `step` may have fewer rows: then each is of a head,
    `of_head` channels in turn that have the same product."""

    channels: Weight
    gate: Weight
    low: Weight
    b: Weight
    c: Weight
    step: Weight
    out: Weight
    conv: Vector
    """Channel by channel its taps."""
    conv_bias: Vector | None
    low_norm: Vector | None
    b_norm: Vector | None
    c_norm: Vector | None
    step_bias: Vector
    decay: Vector
    skip: Vector
    size: int
    taps: int
    words = "Mamba layers"

    @property
    def width(self) -> int:
        return self.channels.rows

    @property
    def of_head(self) -> int:
        return self.width // self.step.rows

    @property
    def row_elements(self) -> int:
        """Also y."""
        return super().row_elements + self.width

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.size, self.width), (self.taps - 1, self.width)

    @property
    def roles(self) -> Roles:
        inputs = self.channels, self.gate, self.low, self.b, self.c, self.step
        return {"QKV projection": inputs, "attention output": (self.out,)}
