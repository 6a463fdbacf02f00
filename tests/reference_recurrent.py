"""Sublayers with a state, token by token, for `reference`."""

from __future__ import annotations

import numpy as np

from engine.description.older_time_mixing import OlderTimeMix
from engine.description.recurrent import DeltaNet, KeyedDeltaNet, Mamba, Recurrent, SelectiveScan, ShortConv
from engine.description.sublayers import Vector, Weight
from engine.description.time_mixing import ChannelMix, TimeMix
from tests.reference_functions import sigmoid
from tests.reference_weights import Floats, ReferenceWeights


class RecurrentReference(ReferenceWeights):
    """Each as its class's docstring has it: of the normed stream h (n, dim), what is added to the stream."""

    def _recurrent(self, part: Recurrent, h: Floats) -> Floats:
        match part:
            case TimeMix():
                return self._time_mix(part, h)
            case ChannelMix():
                return self._channel_mix(part, h)
            case OlderTimeMix():
                return self._older_time_mix(part, h)
            case DeltaNet():
                return self._delta(part, h)
            case KeyedDeltaNet():
                return self._keyed_delta(part, h)
            case Mamba():
                return self._mamba(part, h)
            case SelectiveScan():
                return self._scan(part, h)
            case ShortConv():
                return self._short_conv(part, h)
        raise NotImplementedError(part)

    def _convolved(self, x: Floats, conv: Vector) -> Floats:
        """x (n, channels) with the last tokens' x of each channel: a tap for each."""
        weights = self._vector(conv).reshape(x.shape[1], -1).T
        inputs = np.pad(x, ((len(weights) - 1, 0), (0, 0)))
        return np.stack([(inputs[t : t + len(weights)] * weights).sum(0) for t in range(len(x))])

    def _delta(self, part: DeltaNet, h: Floats) -> Floats:
        n, eps = len(h), np.float32(self.spec.eps)
        inputs = np.concatenate([self._product(h, weight) for weight in part.qkv], -1)
        channels = self._convolved(inputs, part.conv)
        of_keys = part.key_heads * part.size
        parts = np.split(channels * sigmoid(channels), [of_keys, 2 * of_keys], -1)
        q, k, v = (x.reshape(n, -1, part.size) for x in parts)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + eps) for x in (q, k))
        beta = sigmoid(self._product(h, part.beta))
        softplus = np.logaddexp(0, self._product(h, part.alpha, part.decay_bias))
        decay = np.exp(self._vector(part.decay) * softplus)
        y = np.empty((n, part.value_heads, part.size), np.float32)
        for head in range(part.value_heads):
            of, state = head % part.key_heads, np.zeros((part.size, part.size), np.float32)
            if not part.shares_in_turn:
                of = head * part.key_heads // part.value_heads
            for t in range(n):
                state *= decay[t, head]
                state += np.outer(k[t, of], beta[t, head] * (v[t, head] - state.T @ k[t, of]))
                y[t, head] = state.T @ q[t, of] * np.float32(part.size**-0.5)
        gate = self._product(h, part.gate)
        normed = self._normed(y, part.norm, self.spec.eps).reshape(n, -1)
        gate = sigmoid(gate) if part.gating == "sigmoid" else gate * sigmoid(gate)
        return self._product(normed * gate, part.out)

    def _keyed_delta(self, part: KeyedDeltaNet, h: Floats) -> Floats:
        n, eps = len(h), np.float32(self.spec.eps)

        def channels(weight: Weight, conv: Vector) -> Floats:
            x = self._convolved(self._product(h, weight), conv)
            return (x * sigmoid(x)).reshape(n, part.heads, part.size)

        def of_both(weights: tuple[Weight, ...]) -> Floats:
            x = h
            for weight in weights:
                x = self._product(x, weight)
            return x

        q, k, v = map(channels, part.qkv, part.convs)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + eps) for x in (q, k))
        beta, scale = sigmoid(self._product(h, part.beta)), np.float32(part.size**-0.5)
        f = (of_both(part.alphas) + self._vector(part.decay_bias)).reshape(n, part.heads, part.size)
        rates = self._vector(part.decay).reshape(-1, 1)
        decay = np.exp(part.bound * sigmoid(rates * f) if part.bound else rates * np.logaddexp(0, f))
        y = np.empty((n, part.heads, part.size), np.float32)
        for head in range(part.heads):
            state = np.zeros((part.size, part.size), np.float32)
            for t in range(n):
                state *= decay[t, head][:, None]
                state += np.outer(k[t, head], beta[t, head] * (v[t, head] - state.T @ k[t, head]))
                y[t, head] = state.T @ q[t, head] * scale
        normed = self._normed(y, part.norm, self.spec.eps).reshape(n, -1)
        return self._product(normed * sigmoid(of_both(part.gates)), part.out)

    def _mamba(self, part: Mamba, h: Floats) -> Floats:
        n = len(h)
        channels = self._convolved(self._product(h, part.channels), part.conv)
        channels = channels + (self._vector(part.conv_bias) if part.conv_bias else np.float32(0))
        of_groups = part.groups * part.size
        parts = np.split(channels * sigmoid(channels), [part.width, part.width + of_groups], -1)
        x = parts[0].reshape(n, part.heads, -1)
        b, c = (of.reshape(n, part.groups, part.size) for of in parts[1:])
        dt = np.logaddexp(0, self._product(h, part.step, part.step_bias)).astype(np.float32)
        decay, skip = np.exp(self._vector(part.decay) * dt), self._vector(part.skip)
        y = np.empty_like(x)
        for head in range(part.heads):
            of, state = head * part.groups // part.heads, np.zeros((part.size, part.head_dim), np.float32)
            for t in range(n):
                state = decay[t, head] * state + np.outer(b[t, of], dt[t, head] * x[t, head])
                y[t, head] = state.T @ c[t, of] + skip[head] * x[t, head]
        gate = self._product(h, part.gate)
        gated_y = y.reshape(n, -1) * gate * sigmoid(gate)
        if part.norm:
            groups = gated_y.reshape(n, part.groups, -1)
            mean = (groups * groups).mean(-1, keepdims=True)
            gated_y = (groups / np.sqrt(mean + np.float32(self.spec.eps))).reshape(n, -1) * self._vector(
                part.norm
            )
        return self._product(gated_y, part.out)

    def _scan(self, part: SelectiveScan, h: Floats) -> Floats:
        n, eps = len(h), self.spec.eps
        u = self._convolved(self._product(h, part.channels), part.conv)
        u = u + self._vector(part.conv_bias) if part.conv_bias else u
        u = u * sigmoid(u)
        low = self._normed(self._product(u, part.low), part.low_norm, eps)
        b = self._normed(self._product(u, part.b), part.b_norm, eps)
        c = self._normed(self._product(u, part.c), part.c_norm, eps)
        dt = np.repeat(self._product(low, part.step), part.width // part.step.rows, -1)
        dt = np.logaddexp(0, dt + self._vector(part.step_bias)).astype(np.float32)
        decay, skip = self._vector(part.decay).reshape(part.width, part.size), self._vector(part.skip)
        state, y = np.zeros((part.width, part.size), np.float32), np.empty_like(u)
        for t in range(n):
            state = np.exp(decay * dt[t][:, None]) * state + np.outer(dt[t] * u[t], b[t])
            y[t] = state @ c[t] + skip * u[t]
        gate = self._product(h, part.gate)
        return self._product(y * gate * sigmoid(gate), part.out)

    def _short_conv(self, part: ShortConv, h: Floats) -> Floats:
        b, c, v = np.split(self._product(h, part.inputs), 3, -1)
        return self._product(c * self._convolved(b * v, part.conv), part.out)

    def _time_mix(self, part: TimeMix, h: Floats) -> Floats:
        n, shape = len(h), (len(h), part.heads, part.size)
        apart = np.concatenate([np.zeros_like(h[:1]), h[:-1]]) - h
        x_r, x_w, x_k, x_v, x_a, *x_g = h + self._vector(part.lerp).reshape(-1, 1, h.shape[-1]) * apart

        def of_both(weights: tuple[Weight, Weight], x: Floats, bias: Vector | None) -> Floats:
            return self._product(self._product(x, weights[0]), weights[1], bias)

        r, k, v = (
            self._product(x, weight)
            for x, weight in ((x_r, part.receptance), (x_k, part.key), (x_v, part.value))
        )
        low = np.tanh(self._product(x_w, part.decay[0]))
        decay = np.exp(
            np.float32(-(np.e**-0.5)) * sigmoid(self._product(low, part.decay[1], part.decay_bias))
        )
        rate = sigmoid(of_both(part.rate, x_a, part.rate_bias))
        if part.mix:
            v = v + (self._first_values - v) * sigmoid(of_both(part.mix, x_v, part.mix_bias))
        else:
            self._first_values = v
        removed = (k * self._vector(part.removed)).reshape(shape)
        removed = removed / np.linalg.norm(removed, axis=-1, keepdims=True)
        k = k * (1 + (rate - 1) * self._vector(part.replaced))
        bonus = (r * k * self._vector(part.bonus)).reshape(shape).sum(-1, keepdims=True)
        r, k, v, decay, rate = (x.reshape(shape) for x in (r, k, v, decay, rate))
        y = np.empty(shape, np.float32)
        for head in range(part.heads):
            state = np.zeros((part.size, part.size), np.float32)
            for t in range(n):
                taken = np.outer(rate[t, head] * removed[t, head], state.T @ removed[t, head])
                state = decay[t, head][:, None] * state - taken + np.outer(k[t, head], v[t, head])
                y[t, head] = state.T @ r[t, head]
        if part.norm and part.norm_bias:
            y = y - y.mean(-1, keepdims=True)
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(part.NORM_EPS))
            weight, bias = (self._vector(of).reshape(shape[1:]) for of in (part.norm, part.norm_bias))
            y = y * weight + bias
        y = (y + bonus * v).reshape(n, -1)
        if part.gate:
            y = y * self._product(sigmoid(self._product(x_g[0], part.gate[0])), part.gate[1])
        return self._product(y, part.out)

    def _channel_mix(self, part: ChannelMix, h: Floats) -> Floats:
        earlier = np.concatenate([np.zeros_like(h[:1]), h[:-1]])
        read = h + (earlier - h) * self._vector(part.lerp)
        y = self._product(np.maximum(self._product(read, part.up), 0) ** 2, part.down)
        if part.receptance and part.receptance_lerp:
            read = h + (earlier - h) * self._vector(part.receptance_lerp)
            y = y * sigmoid(self._product(read, part.receptance))
        return y

    def _older_time_mix(self, part: OlderTimeMix, h: Floats) -> Floats:
        n, shape = len(h), (len(h), part.heads, part.size)
        apart = np.concatenate([np.zeros_like(h[:1]), h[:-1]]) - h
        low = np.tanh(self._product(h + apart * self._vector(part.lerp_x), part.shared))
        lows = np.split(low, len(part.lerps), -1)
        x_w, x_k, x_v, x_r, x_g = (
            h + apart * (self._vector(lerp) + self._product(low, weight))
            for lerp, weight, low in zip(part.lerps, part.mixing, lows, strict=True)
        )
        decay = self._product(np.tanh(self._product(x_w, part.decay[0])), part.decay[1], part.decay_bias)
        decay = np.exp(-np.exp(decay)).reshape(shape)
        r = self._product(x_r, part.receptance, part.receptance_bias).reshape(shape)
        k, v = (
            np.repeat(
                self._product(x, weight, bias).reshape(n, -1, part.size), part.heads // part.key_heads, 1
            )
            for x, weight, bias in ((x_k, part.key, part.key_bias), (x_v, part.value, part.value_bias))
        )
        k = k if part.first else k * (1 - decay)
        y = np.empty(shape, np.float32)
        for head in range(part.heads):
            state = np.zeros((part.size, part.size), np.float32)
            for t in range(n):
                new = np.outer(k[t, head], v[t, head])
                if part.first:
                    first = self._vector(part.first).reshape(part.heads, part.size)[head]
                    y[t, head] = (state + first[:, None] * new).T @ r[t, head]
                state = decay[t, head][:, None] * state + new
                if not part.first:
                    y[t, head] = state.T @ r[t, head] * np.float32(part.size**-0.5)
        gate = self._product(x_g, part.gate)
        if part.norm and part.norm_bias:
            y = y - y.mean(-1, keepdims=True)
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(part.NORM_EPS))
            weight, bias = (self._vector(of).reshape(shape[1:]) for of in (part.norm, part.norm_bias))
            y, gate = y * weight + bias, gate * sigmoid(gate)
        else:
            gate = sigmoid(gate)
        return self._product(y.reshape(n, -1) * gate, part.out)
