"""RWKV's sublayers (`engine.description.time_mixing`, `older_time_mixing`) as tensor graphs."""

from __future__ import annotations

import math
from functools import partial
from typing import cast

from tinygrad import Tensor

from engine.description.mixing_heads import MixingHeads
from engine.description.older_time_mixing import OlderTimeMix
from engine.description.sublayers import Vector
from engine.description.time_mixing import ChannelMix, LowRank, TimeMix
from engine.targets.graph.delta_net import decayed_sums, general_delta_rule, unit
from engine.targets.graph.inputs import Step
from engine.targets.graph.parts import Parts, Run, centred, normed
from engine.targets.graph.states import States


class MixingLayers(Parts):
    """Each makes of x (n, dim), which is normed, (n, dim). The state of the sequence becomes that after the step."""

    def _time_mix(self, operator: TimeMix, x: Tensor, run: Run) -> Tensor:
        n, o, v = cast(int, x.shape[0]), operator, self._vectors
        step, states = run.step, next(run.states)
        before, apart, last = _read(states, x, step)
        x_r, x_w, x_k, x_v, x_a, *x_g = (
            (x + apart * share).contiguous() for share in v[o.lerp].reshape(-1, o.width)
        )
        r, k, values = (
            self._product(weight, read)
            for weight, read in ((o.receptance, x_r), (o.key, x_k), (o.value, x_v))
        )
        rate = self._of_low_rank(o.rate, x_a, o.rate_bias).sigmoid()
        log_decay = self._product(o.decay[1], self._product(o.decay[0], x_w).tanh(), o.decay_bias).sigmoid()
        log_decay = log_decay * -math.exp(-0.5)
        if o.mix and run.first_values is not None:
            share = self._of_low_rank(o.mix, x_v, o.mix_bias).sigmoid()
            values = values + (run.first_values - values) * share
        values = values.contiguous()

        by_head = partial(_by_head, of=o)
        removed = unit(by_head(k * v[o.removed]), 1e-24)
        k = k * (1 + (rate - 1) * v[o.replaced])
        bonus = by_head(r * k * v[o.bonus]).sum(-1, keepdim=True) * by_head(values)
        adds, replaced, log_decay = _of_used(step, by_head(k), removed * by_head(rate), by_head(log_decay))
        y, state = general_delta_rule(by_head(r), adds, by_head(values), log_decay, removed, replaced, before)
        y = (self._normed_heads(o, y) + bonus).transpose(0, 1).reshape(n, -1)
        if o.gate:
            y = y * self._product(o.gate[1], self._product(o.gate[0], x_g[0]).sigmoid())
        made = [tensor.contiguous() for tensor in (y, state, last)]
        # All at once: views of what was realized before are not kept in captured steps.
        Tensor.realize(values, *made)
        run.first_values = values if run.first_values is None else run.first_values
        return self._product(o.out, states.store(step.sequence, *made))

    def _channel_mix(self, operator: ChannelMix, x: Tensor, run: Run) -> Tensor:
        step, states = run.step, next(run.states)
        apart, last = _read(states, x, step)
        shares = [operator.lerp, operator.receptance_lerp]
        made = [(x + apart * self._vectors[share]).contiguous() for share in shares if share]
        made.append(last.contiguous())
        Tensor.realize(*made)  # all at once: see `_time_mix`
        read = states.store(step.sequence, made[0], made[-1])
        y = self._product(operator.down, self._product(operator.up, read).relu() ** 2)
        return y * self._product(operator.receptance, made[1]).sigmoid() if operator.receptance else y

    def _older_time_mix(self, operator: OlderTimeMix, x: Tensor, run: Run) -> Tensor:
        """As `_time_mix`."""
        n, o, v = cast(int, x.shape[0]), operator, self._vectors
        step, states = run.step, next(run.states)
        before, apart, last = _read(states, x, step)
        low = self._product(o.shared, (x + apart * v[o.lerp_x]).contiguous()).tanh().contiguous()
        lows = low.reshape(n, len(o.lerps), -1)
        x_w, x_k, x_v, x_r, x_g = (
            (x + apart * (v[lerp] + self._product(weight, lows[:, i].contiguous()))).contiguous()
            for i, (lerp, weight) in enumerate(zip(o.lerps, o.mixing, strict=True))
        )

        def by_head(x: Tensor) -> Tensor:
            """Of as many heads as share one."""
            heads = x.reshape(n, -1, 1, o.size).expand(-1, -1, o.heads * o.size // x.shape[-1], -1)
            return _by_head(heads, o)

        r = by_head(self._product(o.receptance, x_r, o.receptance_bias))
        k = by_head(self._product(o.key, x_k, o.key_bias))
        values = by_head(self._product(o.value, x_v, o.value_bias)).contiguous()
        log_decay = self._product(o.decay[1], self._product(o.decay[0], x_w).tanh(), o.decay_bias).exp()
        log_decay = by_head(-log_decay)
        if not o.first:
            k = k * (1 - log_decay.exp())
        k, log_decay = _of_used(step, k, log_decay)
        y, state = decayed_sums(r, k, values, log_decay, before, lags=o.first is not None)
        gate = self._product(o.gate, x_g)
        if o.first:
            first = v[o.first].reshape(o.heads, 1, o.size)
            y = self._normed_heads(o, y + (r * first * k).sum(-1, keepdim=True) * values)
            gate = gate.silu()
        else:
            y, gate = y * o.size**-0.5, gate.sigmoid()
        y = y.transpose(0, 1).reshape(n, -1) * gate
        made = [tensor.contiguous() for tensor in (y, state, last)]
        Tensor.realize(*made)
        return self._product(o.out, states.store(step.sequence, *made))

    def _normed_heads(self, of: MixingHeads, y: Tensor) -> Tensor:
        """y (heads, n, size), each head's LayerNorm of it if there is one."""
        if not (of.norm and of.norm_bias):
            return y
        weight, bias = (self._vectors[part].reshape(of.heads, 1, of.size) for part in (of.norm, of.norm_bias))
        return normed(centred(y), of.NORM_EPS) * weight + bias

    def _of_low_rank(self, of: LowRank, x: Tensor, bias: Vector | None) -> Tensor:
        return self._product(of[1], self._product(of[0], x), bias)


def _read(states: States, x: Tensor, step: Step) -> list[Tensor]:
    """The state of the sequence before a step of x (n, dim), but for its last part, the last x; by how much the token
    before each differs from it, (n, dim); and the last x (1, dim) of those that are used."""
    *before, last = states.of(step.sequence)
    both = last.cat(x).contiguous()
    return [*before, (both[: x.shape[0]] - x).contiguous(), both[step.used : step.used + 1]]


def _by_head(x: Tensor, of: MixingHeads) -> Tensor:
    """Tokens' elements as (heads, n, size)."""
    return x.reshape(x.shape[0], of.heads, of.size).transpose(0, 1)


def _of_used(step: Step, *tensors: Tensor) -> list[Tensor]:
    """Tensors (heads, n, size) that are zeros for the tokens that only fill the step."""
    n = cast(int, tensors[0].shape[1])
    is_used = (Tensor.arange(n) < step.used).reshape(1, n, 1)
    return [is_used.where(tensor, 0.0).contiguous() for tensor in tensors]
