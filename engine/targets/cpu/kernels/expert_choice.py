"""Which experts of a mixture a token takes, and their weights: by the router's logits (`choose_experts`), or by other
scores, which are probabilities with a bias, or compared in groups (`choose_scored_experts`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid
from engine.targets.cpu.kernels.kernel_builder import F32, I32, Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import TOKENS

_LOWEST = -1e38  # less than any logit or score


class Choice(NamedTuple):
    """How a mixture chooses: see `Experts` in `engine.description.sublayers`, whose fields these are. `biased`: it has
    a `choice_bias`; `scaled`: it has `scales`."""

    experts: int
    used: int
    least_sum: float | None
    scoring: Literal["softmax", "sigmoid"]
    biased: bool
    factor: float
    groups: int
    used_groups: int
    scaled: bool


@functools.cache
def choose_experts(
    experts: int, used: int, least: float | None, lanes: int, tile: int, scaled: bool = False
) -> KernelFunction:
    """The `used` experts of the largest logits, of equal ones the first, and their probabilities, a softmax of all
    logits. With `least` these are divided by their sum, or by `least` if that is larger. Buffers: the experts, int32
    (tokens, used); their probabilities, float32 (tokens, used); the state if tile is more than 1, else how often each
    expert was chosen, int32 (experts,), to which the choices are added; the logits, float32 (tokens, experts), each row
    filled up to a multiple of `lanes`. If they are `scaled`: what the probability of each expert is multiplied by at
    last, float32 (experts,)."""
    width = -(-experts // lanes) * lanes

    def kernel(part: UOp, parts: UOp, chosen: UOp, weights: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        state, logits, *scales = buffers
        choices = k.scratch(state) if tile == 1 else None
        first, count = even_share(k.index(state, TOKENS) if tile > 1 else 1, part, parts)
        left, best = k.registers(experts), k.registers(used)
        at, total = k.registers(1, I32), k.registers(1)
        with k.loop(count) as i:
            token = first + i
            with k.loop(experts) as expert:
                k.store(left, expert, k.load(logits, token * width + expert))
            with k.loop(used) as rank:
                _store_largest(k, left, experts, at, best, place=rank)
                k.store(chosen, token * used + rank, k.load(at, 0))
                best_expert = k.index(at, 0)
                if choices is not None:
                    k.store(choices, best_expert, k.load(choices, best_expert) + 1)
                k.store(left, best_expert, UOp.const(_LOWEST, F32))
            largest = k.load(best, 0)
            k.store(total, 0, UOp.const(0.0, F32))
            with k.loop(experts) as expert:
                logit = k.load(logits, token * width + expert)
                k.store(total, 0, k.load(total, 0) + k.exp(logit - largest))
            inverse = k.load(total, 0).reciprocal()
            probabilities = [k.exp(k.load(best, rank) - largest) * inverse for rank in range(used)]
            _store_weights(
                k, weights, chosen, token * used, probabilities, least, scales[0] if scaled else None
            )
        return k.finish(f"choose_experts_{experts}_{used}_{tile}")

    return kernel


@functools.cache
def choose_scored_experts(choice: Choice, lanes: int, tile: int) -> KernelFunction:
    """As `choose_experts`, by scores. Buffers: the same; after the logits, if it is `biased`, what is added to each
    expert's probability for the choice, float32 (experts,); then the scales, if it is `scaled`."""
    experts, used = choice.experts, choice.used
    width = -(-experts // lanes) * lanes

    def kernel(part: UOp, parts: UOp, chosen: UOp, weights: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        state, logits, *rest = buffers
        choices = k.scratch(state) if tile == 1 else None
        first, count = even_share(k.index(state, TOKENS) if tile > 1 else 1, part, parts)
        scores, left, total, at = (
            k.registers(experts),
            k.registers(experts),
            k.registers(1),
            k.registers(1, I32),
        )
        best, kept = k.registers(1), k.registers(used)
        best_group, of_group = k.registers(1, I32), k.registers(1)
        in_groups, is_used = k.registers(choice.groups), k.registers(choice.groups)
        with k.loop(count) as i:
            token = first + i
            with k.loop(experts) as expert:
                k.store(left, expert, k.load(logits, token * width + expert))
            if choice.scoring == "softmax":
                _store_largest(k, left, experts, at, best)
                k.store(total, 0, UOp.const(0.0, F32))
                with k.loop(experts) as expert:
                    power = k.exp(k.load(left, expert) - k.load(best, 0))
                    k.store(scores, expert, power)
                    k.store(total, 0, k.load(total, 0) + power)
            with k.loop(experts) as expert:
                if choice.scoring == "softmax":
                    score = k.load(scores, expert) * k.load(total, 0).reciprocal()
                else:
                    score = sigmoid(k, k.load(left, expert))
                k.store(scores, expert, score)
                k.store(left, expert, score + k.load(rest[0], expert) if choice.biased else score)
            if choice.groups > 1:
                each = experts // choice.groups
                with k.loop(choice.groups) as group:
                    _store_largest(k, left, each, at, best, begin=group * each)
                    second = k.registers(1)
                    k.store(second, 0, UOp.const(_LOWEST, F32))
                    with k.loop(each) as i:
                        is_next = k.load(at, 0).ne(i.cast(I32))
                        value = is_next.where(k.load(left, group * each + i), UOp.const(_LOWEST, F32))
                        k.store(second, 0, k.load(second, 0).maximum(value))
                    k.store(in_groups, group, k.load(best, 0) + k.load(second, 0))
                    k.store(is_used, group, UOp.const(0.0, F32))
                with k.loop(choice.used_groups):
                    _store_largest(k, in_groups, choice.groups, best_group, of_group)
                    k.store(is_used, k.index(best_group, 0), UOp.const(1.0, F32))
                    k.store(in_groups, k.index(best_group, 0), UOp.const(_LOWEST, F32))
                with k.loop(choice.groups) as group, k.loop(each) as i:
                    expert = group * each + i
                    is_left = k.load(is_used, group) > 0.5
                    k.store(left, expert, is_left.where(k.load(left, expert), UOp.const(_LOWEST, F32)))
            with k.loop(used) as rank:
                _store_largest(k, left, experts, at, best)
                k.store(chosen, token * used + rank, k.load(at, 0))
                best_expert = k.index(at, 0)
                if choices is not None:
                    k.store(choices, best_expert, k.load(choices, best_expert) + 1)
                k.store(kept, rank, k.load(scores, best_expert))
                k.store(left, best_expert, UOp.const(_LOWEST, F32))
            probabilities = [k.load(kept, rank) for rank in range(used)]
            scales = rest[-1] if choice.scaled else None
            _store_weights(
                k, weights, chosen, token * used, probabilities, choice.least_sum, scales, choice.factor
            )
        return k.finish(f"choose_scored_experts_{experts}_{used}_{tile}")

    return kernel


def _store_largest(
    k: KernelBuilder, values: UOp, n: int, at: UOp, best: UOp, *, place: Index = 0, begin: Index = 0
) -> None:
    """Stores the largest of `n` values, from `begin` on, at a `place` of `best`, and its number from there on to `at`,
    int32 (1,). Of equal ones it is the first."""
    k.store(best, place, UOp.const(_LOWEST, F32))
    k.store(at, 0, UOp.const(0, I32))
    with k.loop(n) as i:
        value = k.load(values, begin + i)
        is_better = k.load(best, place) < value
        k.store(at, 0, is_better.where(i.cast(I32), k.load(at, 0)))
        k.store(best, place, is_better.where(value, k.load(best, place)))


def _store_weights(
    k: KernelBuilder,
    weights: UOp,
    chosen: UOp,
    first: UOp,
    probabilities: Sequence[UOp],
    least_sum: float | None,
    scales: UOp | None,
    factor: float = 1.0,
) -> None:
    """Stores the weights of the `chosen` experts, from place `first` on: their probabilities, divided by their sum, or
    by `least_sum` if that is larger, and multiplied by `factor` and by the experts' `scales`."""
    for rank, probability in enumerate(probabilities):
        if least_sum is not None:
            probability = probability * add(probabilities).maximum(least_sum).reciprocal()
        probability = probability * factor
        if scales is not None:
            probability = probability * k.load(scales, k.index(chosen, first + rank))
        k.store(weights, first + rank, probability)
