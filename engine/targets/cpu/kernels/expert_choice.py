"""The choice of experts by other scores than the router's logits: probabilities with a bias, or in groups."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid
from engine.targets.cpu.kernels.kernel_builder import F32, I32, Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import TOKENS

_LOWEST = -1e38  # less than any score


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

        def largest(values: UOp, n: int, begin: Index = 0, at: UOp = at, best: UOp = best) -> None:
            """Stores the largest of `n` values to `best`, and its number, from `begin` on, to `at`."""
            k.store(best, 0, UOp.const(_LOWEST, F32))
            k.store(at, 0, UOp.const(0, I32))
            with k.loop(n) as i:
                value = k.load(values, begin + i)
                is_better = k.load(best, 0) < value
                k.store(at, 0, is_better.where(i.cast(I32), k.load(at, 0)))
                k.store(best, 0, is_better.where(value, k.load(best, 0)))

        with k.loop(count) as i:
            token = first + i
            with k.loop(experts) as expert:
                k.store(left, expert, k.load(logits, token * width + expert))
            if choice.scoring == "softmax":
                largest(left, experts)
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
                    largest(left, each, group * each)
                    second = k.registers(1)
                    k.store(second, 0, UOp.const(_LOWEST, F32))
                    with k.loop(each) as i:
                        is_next = k.load(at, 0).ne(i.cast(I32))
                        value = is_next.where(k.load(left, group * each + i), UOp.const(_LOWEST, F32))
                        k.store(second, 0, k.load(second, 0).maximum(value))
                    k.store(in_groups, group, k.load(best, 0) + k.load(second, 0))
                    k.store(is_used, group, UOp.const(0.0, F32))
                with k.loop(choice.used_groups):
                    largest(in_groups, choice.groups, at=best_group, best=of_group)
                    k.store(is_used, k.index(best_group, 0), UOp.const(1.0, F32))
                    k.store(in_groups, k.index(best_group, 0), UOp.const(_LOWEST, F32))
                with k.loop(choice.groups) as group, k.loop(each) as i:
                    expert = group * each + i
                    is_left = k.load(is_used, group) > 0.5
                    k.store(left, expert, is_left.where(k.load(left, expert), UOp.const(_LOWEST, F32)))
            with k.loop(used) as rank:
                largest(left, experts)
                k.store(chosen, token * used + rank, k.load(at, 0))
                best_expert = k.index(at, 0)
                if choices is not None:
                    k.store(choices, best_expert, k.load(choices, best_expert) + 1)
                k.store(kept, rank, k.load(scores, best_expert))
                k.store(left, best_expert, UOp.const(_LOWEST, F32))
            probabilities = [k.load(kept, rank) for rank in range(used)]
            for rank, probability in enumerate(probabilities):
                if choice.least_sum is not None:
                    probability = probability * add(probabilities).maximum(choice.least_sum).reciprocal()
                probability = probability * choice.factor
                if choice.scaled:
                    expert = k.index(chosen, token * used + rank)
                    probability = probability * k.load(rest[-1], expert)
                k.store(weights, token * used + rank, probability)
        return k.finish(f"choose_scored_experts_{experts}_{used}_{tile}")

    return kernel
