"""Layers with recurrent states as tensor graphs. The state of the sequence becomes that after the step."""

from __future__ import annotations

from typing import cast

from tinygrad import Tensor

from engine.description.recurrent import DeltaNet, KeyedDeltaNet, Mamba, SelectiveScan, ShortConv
from engine.description.sublayers import Vector, Weight
from engine.targets.graph.delta_net import convolved, delta_rule, heads, keyed_delta_rule, unit
from engine.targets.graph.parts import Parts, Run, normed


class RecurrentLayers(Parts):
    """Each makes of x (n, dim), which is normed, (n, dim)."""

    def _delta(self, operator: DeltaNet, x: Tensor, run: Run) -> Tensor:
        """x (n, dim), which is normed -> (n, dim). The state of the sequence becomes that after the step."""
        n, v, step, states = cast(int, x.shape[0]), self._vectors, run.step, next(run.states)
        (before, inputs), used = states.of(step.sequence), step.used
        channels, inputs = convolved(self._joined(operator.qkv, x), v[operator.conv], inputs, used)
        beta = self._product(operator.beta, x).sigmoid()
        log_decay = v[operator.decay] * self._product(operator.alpha, x, operator.decay_bias).softplus()
        is_new = (Tensor.arange(n) < used).reshape(n, 1)
        beta, log_decay = (is_new.where(t, 0.0).transpose() for t in (beta, log_decay))
        y, state = delta_rule(*heads(operator, channels.silu(), self.spec.eps), log_decay, beta, before)
        y = states.store(step.sequence, y, state, inputs)
        y = self._norm(y.transpose(0, 1), operator.norm).reshape(n, -1)
        gate = self._product(operator.gate, x)
        gate = gate.sigmoid() if operator.gating == "sigmoid" else gate.silu()
        return self._product(operator.out, y * gate)

    def _keyed_delta(self, operator: KeyedDeltaNet, x: Tensor, run: Run) -> Tensor:
        """As `_delta`."""
        n, v, o, step, states = cast(int, x.shape[0]), self._vectors, operator, run.step, next(run.states)
        (before, inputs), used = states.of(step.sequence), step.used
        first, *others = (v[conv] for conv in o.convs)
        channels, inputs = convolved(self._joined(o.qkv, x), first.cat(*others), inputs, used)

        def of_both(weights: tuple[Weight, ...], bias: Vector | None = None) -> Tensor:
            *narrow, last = weights
            return self._product(last, self._product(narrow[0], x) if narrow else x, bias)

        def by_head(x: Tensor) -> Tensor:
            return x.reshape(n, o.heads, -1).transpose(0, 1)

        f, decay = by_head(of_both(o.alphas, o.decay_bias)), v[o.decay].reshape(-1, 1, 1)
        log_decay = o.bound * (decay * f).sigmoid() if o.bound else decay * f.softplus()
        is_new = (Tensor.arange(n) < used).reshape(1, n, 1)
        beta = by_head(self._product(o.beta, x).sigmoid())
        beta, log_decay = (is_new.where(t, 0.0).contiguous() for t in (beta, log_decay))
        q, k, values = (by_head(part) for part in channels.silu().contiguous().chunk(3, dim=-1))
        q, k = (unit(t, self.spec.eps) for t in (q, k))
        y, state = keyed_delta_rule(q * o.size**-0.5, k, values, log_decay, beta, before)
        y = states.store(step.sequence, y, state, inputs)
        y = self._norm(y.transpose(0, 1), o.norm).reshape(n, -1)
        return self._product(o.out, y * of_both(o.gates).sigmoid())

    def _short_conv(self, operator: ShortConv, x: Tensor, run: Run) -> Tensor:
        """As `_delta`."""
        step, states = run.step, next(run.states)
        b, c, v = self._product(operator.inputs, x).chunk(3, dim=-1)
        [before] = states.of(step.sequence)
        y, inputs = convolved(b * v, self._vectors[operator.conv], before, step.used)
        y = states.store(step.sequence, c * y, inputs)
        return self._product(operator.out, y)

    def _mamba(self, operator: Mamba, x: Tensor, run: Run) -> Tensor:
        """As `_delta`."""
        n, v, o, step, states = cast(int, x.shape[0]), self._vectors, operator, run.step, next(run.states)
        before, inputs = states.of(step.sequence)
        channels, inputs = convolved(self._product(o.channels, x), v[o.conv], inputs, step.used)
        channels = (channels if o.conv_bias is None else channels + v[o.conv_bias]).silu().contiguous()

        def of_groups(first: int) -> Tensor:
            """B or C of each head: (heads, n, size)."""
            rows = channels[:, first : first + o.groups * o.size].reshape(n, o.groups, 1, o.size)
            return rows.expand(-1, -1, o.heads // o.groups, -1).reshape(n, o.heads, o.size).transpose(0, 1)

        values = channels[:, : o.width].reshape(n, o.heads, o.head_dim).transpose(0, 1)
        dt = self._product(o.step, x, o.step_bias).softplus()
        dt = (Tensor.arange(n) < step.used).reshape(n, 1).where(dt, 0.0).transpose()
        log_decay = dt * v[o.decay].reshape(o.heads, 1)
        b, c = of_groups(o.width), of_groups(o.width + o.groups * o.size)
        y, state = delta_rule(c, b, values, log_decay, dt, before, corrects=False)
        y = states.store(step.sequence, y + values * v[o.skip].reshape(-1, 1, 1), state, inputs)
        y = y.transpose(0, 1).reshape(n, -1) * self._product(o.gate, x).silu()
        if o.norm:
            y = normed(y.reshape(n, o.groups, -1), self.spec.eps).reshape(n, -1) * v[o.norm]
        return self._product(o.out, y.contiguous())

    def _scan(self, operator: SelectiveScan, x: Tensor, run: Run) -> Tensor:
        """As `_delta`. The tokens of a step are joined two and two, four and four, and so on: what a run of tokens
        makes of a state S is decay S + added."""
        n, v, o, step, states = cast(int, x.shape[0]), self._vectors, operator, run.step, next(run.states)
        before, inputs = states.of(step.sequence)
        u, inputs = convolved(self._product(o.channels, x), v[o.conv], inputs, step.used)
        u = (u if o.conv_bias is None else u + v[o.conv_bias]).silu().contiguous()
        low, b, c = (self._product(weight, u) for weight in (o.low, o.b, o.c))
        low, b, c = (
            self._norm(y, norm) if norm else y
            for y, norm in zip((low, b, c), (o.low_norm, o.b_norm, o.c_norm), strict=True)
        )
        dt = self._product(o.step, low)
        if o.of_head > 1:
            dt = dt.unsqueeze(-1).expand(-1, -1, o.of_head).reshape(n, o.width)
        dt = (dt + v[o.step_bias]).softplus()
        dt = (Tensor.arange(n) < step.used).reshape(n, 1).where(dt, 0.0).unsqueeze(1).contiguous()
        decay = (dt * v[o.decay].reshape(o.width, o.size).transpose()).exp().contiguous()
        added = b.unsqueeze(2) * dt * u.unsqueeze(1)
        added = (added[:1] + decay[:1] * before).cat(added[1:]).contiguous()
        for i in range((n - 1).bit_length()):
            run_before = 1 << i
            earlier = added[:-run_before].pad(((run_before, 0), None, None))
            decay_before = decay[:-run_before].pad(((run_before, 0), None, None), value=1.0)
            added, decay = (added + decay * earlier).contiguous(), (decay * decay_before).contiguous()
        y = (added * c.unsqueeze(2)).sum(1) + v[o.skip] * u
        y = states.store(step.sequence, y, added[-1], inputs)
        return self._product(o.out, y * self._product(o.gate, x).silu())
