"""RWKV 7's sublayers (`engine.description.time_mixing`) as tensor graphs."""

from __future__ import annotations

import math
from typing import cast

from tinygrad import Tensor, UOp

from engine.description.sublayers import Vector
from engine.description.time_mixing import ChannelMix, LowRank, TimeMix
from engine.targets.graph.delta_net import general_delta_rule, unit
from engine.targets.graph.parts import Parts, Run, centred, normed


class MixingLayers(Parts):
    """Each makes of x (n, dim), which is normed, (n, dim). The state of the sequence becomes that after the step."""

    def _time_mix(self, operator: TimeMix, x: Tensor, run: Run) -> Tensor:
        n, o, v = cast(int, x.shape[0]), operator, self._vectors
        step, states = run.step, next(run.states)
        before, last = states.of(step.sequence)
        earlier, last = _earlier(x, last, step.used)
        apart = (earlier - x).contiguous()
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

        def by_head(x: Tensor) -> Tensor:
            return x.reshape(n, o.heads, o.size).transpose(0, 1)

        removed = unit(by_head(k * v[o.removed]), 1e-24)
        k = k * (1 + (rate - 1) * v[o.replaced])
        bonus = by_head(r * k * v[o.bonus]).sum(-1, keepdim=True) * by_head(values)
        is_new = (Tensor.arange(n) < step.used).reshape(1, n, 1)
        adds, replaced, log_decay = (
            is_new.where(t, 0.0).contiguous()
            for t in (by_head(k), removed * by_head(rate), by_head(log_decay))
        )
        y, state = general_delta_rule(by_head(r), adds, by_head(values), log_decay, removed, replaced, before)
        if o.norm and o.norm_bias:
            weight, bias = (v[of].reshape(o.heads, 1, o.size) for of in (o.norm, o.norm_bias))
            y = normed(centred(y), o.NORM_EPS) * weight + bias
        y = (y + bonus).transpose(0, 1).reshape(n, -1)
        if o.gate:
            y = y * self._product(o.gate[1], self._product(o.gate[0], x_g[0]).sigmoid())
        made = [tensor.contiguous() for tensor in (y, state, last)]
        # All at once: views of what was realized before are not kept in captured steps.
        Tensor.realize(values, *made)
        run.first_values = values if run.first_values is None else run.first_values
        return self._product(o.out, states.store(step.sequence, *made))

    def _channel_mix(self, operator: ChannelMix, x: Tensor, run: Run) -> Tensor:
        step, states = run.step, next(run.states)
        [last] = states.of(step.sequence)
        earlier, last = _earlier(x, last, step.used)
        read = states.store(step.sequence, x + (earlier - x) * self._vectors[operator.lerp], last)
        return self._product(operator.down, self._product(operator.up, read).relu() ** 2)

    def _of_low_rank(self, of: LowRank, x: Tensor, bias: Vector | None) -> Tensor:
        return self._product(of[1], self._product(of[0], x), bias)


def _earlier(x: Tensor, last: Tensor, used: UOp | int) -> tuple[Tensor, Tensor]:
    """The x (n, dim) of the tokens before, of which the first one is `last` (1, dim); and the last x of those used."""
    both = last.cat(x).contiguous()
    return both[: x.shape[0]], both[used : used + 1]
