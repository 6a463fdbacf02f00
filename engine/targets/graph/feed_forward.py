"""Feed-forward layers and mixtures of experts as tensor graphs."""

from __future__ import annotations

import math

from tinygrad import Tensor

from engine.description.feed_forward import (
    MIN_PROBABILITY,
    Activation,
    Dense,
    Experts,
    SideBySide,
    SiluLimits,
)
from engine.description.sublayers import Vector, Weight
from engine.targets.graph.parts import Parts, Run


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """See `Activation`."""
    match activation:
        case "silu":
            return gate.silu() * up
        case "gelu":
            return gate.gelu() * up  # tinygrad's is the form with tanh
        case "relu":
            return gate.relu() * up
        case "relu2":
            return gate.relu() ** 2 * up
        case SiluLimits():
            return gate.minimum(activation.gate).silu() * up.clamp(-activation.up, activation.up)
    gate, up = gate.minimum(7), up.clamp(-7, 7)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def xielu(x: Tensor, n: float, p: float, b: float, e: float) -> Tensor:
    """See `Dense`."""
    negative = n * (x.minimum(e).exp() - 1 - x)
    return (x > 0).where(p * x * x, negative) + b * x


class FeedForwardLayers(Parts):
    """Each makes of x (n, dim), which is normed, (n, dim)."""

    def _beside(self, operator: SideBySide, x: Tensor, run: Run) -> Tensor:
        """x (n, dim), which is not normed -> (n, dim)."""
        dense = self._dense(operator.dense, self._stream_norm(x, operator.dense_norm), run)
        h, of_router = (
            self._stream_norm(x, operator.experts_norm),
            self._stream_norm(x, operator.router_scale),
        )
        experts = self._experts(operator.experts, h, run, of_router)
        return self._norm(dense, operator.dense_post_norm) + self._norm(experts, operator.experts_post_norm)

    def _choose(self, operator: Experts, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The experts that the tokens x (n, dim) take, first each token's most probable one: their numbers and their
        probabilities, (n,) each."""
        logits = self._product(operator.router, x, operator.router_bias)
        scores = (logits.softmax(-1) if operator.scoring == "softmax" else logits.sigmoid()).contiguous()
        left = scores if operator.choice_bias is None else scores + self._vectors[operator.choice_bias]
        if operator.groups > 1:
            left = _in_best_groups(operator, left.contiguous()).contiguous()
        numbers = Tensor.arange(operator.count).reshape(1, -1)
        chosen, probabilities = [], []
        for _ in range(operator.used):
            best = left.argmax(-1)
            is_best = numbers == best.unsqueeze(-1)
            chosen.append(best.contiguous())
            probabilities.append(is_best.where(scores, 0.0).sum(-1))
            left = is_best.where(-math.inf, left).contiguous()
        return chosen, probabilities

    def _experts(self, operator: Experts, x: Tensor, run: Run, of_router: Tensor | None = None) -> Tensor:
        """x (n, dim), which is normed, as is what the router reads if that differs -> (n, dim). One expert for each
        token at a time."""
        of_router = run.before if operator.routes_before else of_router
        chosen, probabilities = self._choose(operator, x if of_router is None else of_router)
        total = sum(probabilities[1:], start=probabilities[0]).maximum(MIN_PROBABILITY)
        y: Tensor | None = None
        weighed, of_experts = operator.weighed_inputs, x
        if operator.narrow:
            of_experts = self._product(operator.narrow[0], x)
        for experts, probability in zip(chosen, probabilities, strict=True):

            def product(weight: Weight, bias: Vector | None, x: Tensor, experts: Tensor = experts) -> Tensor:
                y = self._matrices[weight].products_of(experts, x, operator.count)
                return y if bias is None else y + self._vectors[bias].reshape(operator.count, -1)[experts]

            factor = (probability / total if operator.renormalised else probability) * operator.factor
            read = (of_experts * factor.unsqueeze(-1)).contiguous() if weighed else of_experts
            first, *others = (product(weight, bias, read) for weight, bias in operator.firsts)
            hidden = gated(first, others[0] if others else first.ones_like(), operator.activation)
            part = product(operator.down, operator.down_bias, hidden.contiguous())
            if operator.scales:
                factor = factor * self._vectors[operator.scales][experts]
            part = part if weighed else part * factor.unsqueeze(-1)
            y = part if y is None else y + part
        assert y is not None
        if operator.narrow:
            y = self._product(operator.narrow[1], y)
        if operator.shared:
            shared = self._dense(operator.shared, x, run)
            if operator.shared_gate:
                shared = self._product(operator.shared_gate, x).sigmoid() * shared
            y = y + shared
        return y

    def _dense(self, operator: Dense, x: Tensor, run: Run) -> Tensor:
        up = self._product(operator.up, x, operator.up_bias)
        gate = self._product(operator.gate, x, operator.gate_bias) if operator.gate else up
        up = up if operator.gate else up.ones_like()
        if operator.sparsity:
            least = gate.mean(-1, keepdim=True) + operator.sparsity * gate.std(-1, keepdim=True)
            gate = (gate - least.contiguous()).relu()
        hidden = xielu(gate, *operator.curve) if operator.curve else gated(gate, up, operator.activation)
        hidden = self._norm(hidden, operator.hidden_norm) if operator.hidden_norm else hidden
        return self._product(operator.down, hidden, operator.down_bias)


def _in_best_groups(operator: Experts, scores: Tensor) -> Tensor:
    """The scores (n, experts), -inf for the experts that are in none of a token's best groups."""
    groups = scores.reshape(-1, operator.groups, operator.count // operator.groups)
    numbers = Tensor.arange(groups.shape[-1])
    is_first = numbers == groups.argmax(-1).unsqueeze(-1)
    left = (groups.max(-1) + is_first.where(-math.inf, groups).max(-1)).contiguous()
    numbers, is_used = Tensor.arange(operator.groups), left < -math.inf
    for _ in range(operator.used_groups):
        is_best = numbers == left.argmax(-1).unsqueeze(-1)
        is_used, left = is_used | is_best, is_best.where(-math.inf, left).contiguous()
    return is_used.unsqueeze(-1).where(groups, -math.inf).reshape(scores.shape)
