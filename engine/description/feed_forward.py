"""Feed-forward layers and mixtures of experts, as data. For each, its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.description.sublayers import Operator, Roles, Vector, Weight

Scoring = Literal["softmax", "sigmoid"]
MIN_PROBABILITY = 6.1e-5
"""What the probabilities of chosen experts are divided by at least: build_moe_ffn in src/llama-graph.cpp."""


class SiluLimits(NamedTuple):
    """silu(g) * u of a gate g and u, where g is at most `gate`, and u from -`up` to `up`."""

    gate: float
    up: float


Activation = Literal["silu", "gelu", "swiglu_oai", "relu", "relu2"] | SiluLimits
"""Of a gate g and u: silu(g) * u, also within limits, gelu(g) * u in the form with tanh, or gpt-oss's:
g * sigmoid(1.702 * g) * (u + 1) with g of at most 7 and u from -7 to 7. relu(g) is max(g, 0), and relu2(g) its
square."""


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
    probability, in place of its result (llama4). If they are `narrow`, the experts alone read narrow[0] x, and what
    they add up to is multiplied by narrow[1].

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
    narrow: tuple[Weight, Weight] | None = None
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
        experts: Roles = {
            "router": (self.router, self.shared_gate),
            "experts gate+up": tuple(weight for weight, _ in self.firsts),
            "experts down": (self.down,),
        }
        return experts | (
            {"FFN gate+up": self.narrow[:1], "FFN down": self.narrow[1:]} if self.narrow else {}
        )


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
