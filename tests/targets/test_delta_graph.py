"""The delta rule for many tokens at once against one token after the other, in float64."""

import numpy as np
import pytest
from tinygrad import Tensor

from engine.targets.graph.delta_net import delta_rule, general_delta_rule, keyed_delta_rule
from tests.thorough import rarely

HEADS, SIZE = 3, 32


def one_by_one(q, k, v, log_decay, beta, state):
    state, y = state.astype(np.float64), np.empty(v.shape)
    for t in range(q.shape[1]):
        decays = log_decay[:, t] if log_decay.ndim == 3 else log_decay[:, t, None]
        state *= np.exp(decays[..., None].astype(np.float64))
        d = beta[:, t, None] * (v[:, t] - np.einsum("hkv,hk->hv", state, k[:, t]))
        state += k[:, t, :, None] * d[:, None]
        y[:, t] = np.einsum("hkv,hk->hv", state, q[:, t])
    return y, state


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("n", [rarely(1), 32])
@pytest.mark.parametrize("varied", [1.0, 1e-3])
def test_many_tokens_give_the_same_as_one_by_one(n, varied):
    """With keys that hardly vary and no decay, powers of their overlaps are as large as 1e8."""
    rng = np.random.default_rng(0)
    q, v, noise = (rng.standard_normal((HEADS, n, SIZE)).astype(np.float32) for _ in range(3))
    k = rng.standard_normal((HEADS, 1, SIZE)).astype(np.float32) * (1 - varied) + varied * noise
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -varied * rng.uniform(0, 3, (HEADS, n)).astype(np.float32)
    beta = 1 - varied * rng.uniform(0, 1, (HEADS, n)).astype(np.float32)
    state = rng.standard_normal((HEADS, SIZE, SIZE)).astype(np.float32)
    wanted = one_by_one(q, k, v, log_decay, beta, state)
    got = delta_rule(*map(Tensor, (q, k, v, log_decay, beta, state)))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=2e-5 * np.abs(other).max())


@pytest.mark.usefixtures("plain_graphs")
def test_decays_of_keys():
    """Some elements are forgotten at once, so that the inverse of their decays has no float32."""
    rng, n = np.random.default_rng(0), 16
    q, k, v = (rng.standard_normal((HEADS, n, SIZE)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -(rng.uniform(0, 1, (HEADS, n, SIZE)) ** 8 * 60).astype(np.float32)
    beta = rng.uniform(0, 1, (HEADS, n)).astype(np.float32)
    state = rng.standard_normal((HEADS, SIZE, SIZE)).astype(np.float32)
    wanted = one_by_one(q, k, v, log_decay, beta, state)
    got = keyed_delta_rule(*map(Tensor, (q, k, v, log_decay, beta[..., None], state)))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=2e-5 * np.abs(other).max())


@pytest.mark.usefixtures("plain_graphs")
def test_what_is_taken_off_need_not_be_what_is_added():
    """The last token fills the step: it leaves the state as it is."""
    rng, n = np.random.default_rng(0), 16
    q, k, v, a, b = (rng.standard_normal((HEADS, n, SIZE)).astype(np.float32) for _ in range(5))
    a /= np.linalg.norm(a, axis=-1, keepdims=True)
    b = a * rng.uniform(0, 1, a.shape).astype(np.float32)
    log_decay = -(rng.uniform(0, 0.6, a.shape)).astype(np.float32)
    for of in k, b, log_decay:
        of[:, -1] = 0
    state = rng.standard_normal((HEADS, SIZE, SIZE)).astype(np.float32)
    got = general_delta_rule(*map(Tensor, (q, k, v, log_decay, a, b, state)))
    left, y = state.astype(np.float64), np.empty(v.shape)
    for t in range(n):
        taken = b[:, t, :, None] * np.einsum("hkv,hk->hv", left, a[:, t])[:, None]
        left = np.exp(log_decay[:, t])[..., None] * left - taken + k[:, t, :, None] * v[:, t, None]
        y[:, t] = np.einsum("hkv,hk->hv", left, q[:, t])
    for one, other in zip(got, (y, left), strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=2e-5 * np.abs(other).max())
