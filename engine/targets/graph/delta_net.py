"""Gated delta nets (`recurrent.DeltaNet` of the description) as tensor graphs: the convolution and the delta rule.

The tokens of a step read the state at once. With G the sums of the logarithms of the decays so far, and S the state
before the step, what the delta rule adds for token t is k_t d_t^T, and

    d_t = beta_t (v_t - exp(G_t) S^T k_t - sum over s < t of exp(G_t - G_s) (k_s . k_t) d_s)
    y_t = exp(G_t) S^T q_t + sum over s <= t of exp(G_t - G_s) (k_s . q_t) d_s
    S after n tokens = exp(G_n) S + sum over s of exp(G_n - G_s) k_s d_s^T

The first line is a triangular system of equations for the d. It is solved by blocks: if X has the inverses of the
diagonal blocks of I + A of b rows, those of 2 b rows are X - X (A, but only between such neighbours) X. This is as
exact as one equation after the other; a sum of powers of A is not, where keys resemble each other.
"""

from __future__ import annotations

import functools
import math
from typing import cast

import numpy as np
from tinygrad import Tensor, UOp

from engine.description.recurrent import DeltaNet


def convolved(
    x: Tensor, taps: Tensor, before: Tensor, count: UOp | int, dilation: int = 1
) -> tuple[Tensor, Tensor]:
    """The causal convolution of x (n, channels) after its inputs `before`: (n, channels); and the inputs to be kept
    after `count` tokens. `taps`: (channels * taps,), so many tokens apart as the `dilation`."""
    n, kept = cast(int, x.shape[0]), cast(int, before.shape[0])
    others = kept // dilation
    inputs, weights = before.cat(x).contiguous(), taps.reshape(-1, others + 1)
    of_taps = (inputs[j * dilation : j * dilation + n] * weights[:, j] for j in range(1, others + 1))
    y = sum(of_taps, start=inputs[:n] * weights[:, 0])
    return y, inputs[count : count + kept]


def unit(x: Tensor, eps: float) -> Tensor:
    """Vectors (..., size) of length 1."""
    return x * ((x * x).sum(-1, keepdim=True) + eps).rsqrt()


def heads(operator: DeltaNet, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the value heads, (value_heads, n, size) each, of channels x (n, channels)."""
    n, of_keys = cast(int, x.shape[0]), operator.key_heads * operator.size

    def of_values(x: Tensor) -> Tensor:
        x = unit(x.reshape(n, operator.key_heads, operator.size), eps)
        copies = operator.value_heads // operator.key_heads
        x = (
            x.unsqueeze(1).expand(-1, copies, -1, -1)
            if operator.shares_in_turn
            else x.unsqueeze(2).expand(-1, -1, copies, -1)
        )
        return x.reshape(n, operator.value_heads, operator.size).transpose(0, 1)

    q, k = of_values(x[:, :of_keys]), of_values(x[:, of_keys : 2 * of_keys])
    v = x[:, 2 * of_keys :].reshape(n, operator.value_heads, operator.size).transpose(0, 1)
    return q * operator.size**-0.5, k, v


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, corrects: bool = True
) -> tuple[Tensor, Tensor]:
    """The results (heads, n, size), and the state after the tokens. q, k and v are (heads, n, size), `log_decay` and
    `beta` (heads, n). A token with a beta and a logarithm of 0 leaves the state as it is. If it `corrects` not, a token
    adds what it has whatever the state has for its key, d = beta v, as Mamba 2 layers do."""
    n: int = q.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sums = (log_decay @ Tensor.ones(n, n).triu()).contiguous()  # (heads, n)
    decay = sums.exp().unsqueeze(-1)
    # exp of what is above the diagonal could be infinite
    between = (sums.unsqueeze(2) - sums.unsqueeze(1)).tril().exp().tril()  # (heads, t, s)
    weighted = beta.unsqueeze(-1)
    of_state = ((k.cat(q, dim=1) if corrects else q) @ state).contiguous()
    d = (weighted * (v - decay * of_state[:, :n] if corrects else v)).contiguous()
    if n > 1 and corrects:
        overlaps = (weighted * between * (k @ k.transpose(1, 2))).contiguous()
        d = (_inverse(overlaps) @ d).contiguous()
    scores = (between * (q @ k.transpose(1, 2))).contiguous()
    y = decay * of_state[:, -n:] + scores @ d
    left = (sums[:, -1:] - sums).exp().unsqueeze(-1)
    return y.contiguous(), (decay[:, -1:] * state + (k * left).transpose(1, 2) @ d).contiguous()


def keyed_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, with a decay of each element of a key: `log_decay` is (heads, n, size), and `beta` (heads, n,
    1). Products of keys have the decays between their tokens within the sum, since exp(-G_s) could be infinite."""
    n: int = q.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sums = (Tensor.ones(n, n).tril() @ log_decay).contiguous()  # (heads, n, size)
    is_before = Tensor.ones(n, n).tril().reshape(1, n, n, 1) > 0
    apart = is_before.where(sums.unsqueeze(2) - sums.unsqueeze(1), -math.inf).exp()  # (heads, t, s, size)

    def products(x: Tensor) -> Tensor:
        """Products of x_t and the keys of the tokens so far, with the decays between: (heads, t, s)."""
        return (apart * x.unsqueeze(2) * k.unsqueeze(1)).sum(-1).contiguous()

    decay = sums.exp()
    of_state = ((k * decay).cat(q * decay, dim=1).contiguous() @ state).contiguous()
    d = (beta * (v - of_state[:, :n])).contiguous()
    if n > 1:
        d = (_inverse((beta * products(k)).contiguous()) @ d).contiguous()
    y = of_state[:, n:] + products(q) @ d
    left = (sums[:, -1:] - sums).exp()
    kept = decay[:, -1:].transpose(1, 2) * state
    return y.contiguous(), (kept + (k * left).contiguous().transpose(1, 2) @ d).contiguous()


def general_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `keyed_delta_rule`, of tokens that compute S = decays S - b (S^T a)^T + k v^T and y = S^T q (RWKV 7). What is
    taken off a state for token t is b_t u_t^T: u_t = S^T a_t, of the S before its decay. All but the `state` are
    (heads, n, size). A token whose k, b and `log_decay` are 0 leaves the state as it is."""
    n: int = q.shape[1]
    sums = (Tensor.ones(n, n).tril() @ log_decay).contiguous()
    is_before = Tensor.ones(n, n).tril().reshape(1, n, n, 1) > 0
    apart = is_before.where(sums.unsqueeze(2) - sums.unsqueeze(1), -math.inf).exp()  # (heads, t, s, size)
    q, k, v, b, a = (x.contiguous() for x in (q, k, v, b, a * (-log_decay).exp()))

    def products(x: Tensor, of: Tensor) -> Tensor:
        """Products of x_t and `of` of the tokens so far, with the decays between: (heads, t, s)."""
        return (apart * x.unsqueeze(2) * of.unsqueeze(1)).sum(-1).contiguous()

    decay = sums.exp()
    of_state = ((a * decay).cat(q * decay, dim=1).contiguous() @ state).contiguous()
    u = of_state[:, :n]
    if n > 1:
        u = _inverse(products(a, b)) @ (u + products(a, k).tril(-1).contiguous() @ v).contiguous()
    y = of_state[:, n:] + products(q, k) @ v - products(q, b) @ u.contiguous()
    left = (sums[:, -1:] - sums).exp()
    added, taken = ((x * left).contiguous().transpose(1, 2) for x in (k, b))
    kept = decay[:, -1:].transpose(1, 2) * state
    return y.contiguous(), (kept + added @ v - taken @ u.contiguous()).contiguous()


def decayed_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, lags: bool
) -> tuple[Tensor, Tensor]:
    """As `general_delta_rule`, of tokens that compute S = decays S + k v^T and y = S^T q; if it `lags`, y is of the S
    before that (RWKV 6)."""
    n: int = q.shape[1]
    sums = (Tensor.ones(n, n).tril() @ log_decay).contiguous()
    read = (sums - log_decay if lags else sums).contiguous()
    counts = Tensor.ones(n, n).tril(-1 if lags else 0).reshape(1, n, n, 1) > 0
    apart = counts.where(read.unsqueeze(2) - sums.unsqueeze(1), -math.inf).exp()  # (heads, t, s, size)
    q, k = q.contiguous(), k.contiguous()
    scores = (apart * q.unsqueeze(2) * k.unsqueeze(1)).sum(-1).contiguous()
    y = (q * read.exp()).contiguous() @ state + scores @ v
    left = (sums[:, -1:] - sums).exp()
    kept = sums[:, -1:].exp().transpose(1, 2) * state
    return y.contiguous(), (kept + (k * left).contiguous().transpose(1, 2) @ v).contiguous()


def _inverse(overlaps: Tensor) -> Tensor:
    """The inverses of I + what is below the diagonal of `overlaps` (heads, n, n), whose n is a power of 2."""
    n: int = overlaps.shape[1]
    x = Tensor.eye(n).expand(overlaps.shape).contiguous()
    for neighbours in _neighbours(n):
        x = (x - x @ ((neighbours * overlaps) @ x).contiguous()).contiguous()
    return x


@functools.cache
def _neighbours(n: int) -> list[Tensor]:
    """For blocks of 1, 2, ... n / 2 rows, ones between the second and the first block of each pair, float32 (n, n).
    They are in memory, so that all blocks share kernels."""
    rows, columns = np.arange(n)[:, None], np.arange(n)[None, :]
    sizes = [1 << i for i in range(n.bit_length() - 1)]
    masks = [(rows // size % 2 == 1) & (columns // size == rows // size - 1) for size in sizes]
    return [Tensor(mask.astype(np.float32)).realize() for mask in masks]
