"""Attention, also to a vector that all heads share and to chosen tokens, for `reference`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.description.attention import Attention, Indexer, LatentAttention
from engine.description.sublayers import Vector
from tests.reference_functions import centred, sigmoid, softmax
from tests.reference_weights import Floats, ReferenceWeights

NEIGHBOURS = {
    "llama", "llama4", "mistral3", "granite", "granitemoe", "smollm3", "chatglm", "ernie4_5", "ernie4_5-moe", "glm4",
    "granitehybrid", "command-r", "cohere2", "internlm2", "minicpm", "deepseek2", "deepseek", "bailingmoe", "arcee",
    "maincoder", "xverse", "baichuan", "deci", "granite_swa", "olmo", "muse-glimmer", "mistral4", "llama-embed",
    "cohere2moe", "plm", "nanbeige", "neo-bert", "bailingmoe3", "deepseek32", "glm-dsa",
}  # fmt: skip
"""Architectures whose files hold the two elements of a rotary pair side by side; in the others they are apart by half
of what is rotated."""


class AttentionReference(ReferenceWeights):
    """With keys and values of all tokens at once. `context`: that of the session, on which phi3's rotary embedding and
    chosen tokens depend."""

    context: int

    def _attend(self, part: Attention, h: Floats, caches: list[tuple[Floats, Floats]]) -> Floats:
        """`caches`: keys and values of the attention before this one; its own are appended."""
        a, n = part, len(h)
        most = np.float32(a.limit or np.inf)
        q = self._turned(a, np.clip(self._product(h, a.q, a.q_bias), -most, most), a.q_norm)
        if a.k:
            projected = np.clip(self._product(h, a.k, a.k_bias), -most, most)
            v = np.clip(self._product(h, a.v, a.v_bias), -most, most) if a.v else projected
            v = v.reshape(n, a.kv_heads, -1) * np.float32(a.value_factor)
            if a.has_normed_values:
                v = v / np.sqrt((v * v).mean(-1, keepdims=True) + np.float32(self.spec.eps))
            caches.append((self._turned(a, projected, a.k_norm), v))
        else:
            assert a.cache_of is not None
            caches.append(caches[a.cache_of])
        k, v = caches[-1]
        if (temperature := self.spec.temperature) and a.tempered:
            steps = np.floor((np.arange(n) + temperature.later) / temperature.length)
            q = q * (1 + temperature.slope * np.log(1 + steps)).astype(np.float32)[:, None, None]
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        hidden = (distance < 0) | (distance >= a.window if a.window else False)
        if a.chunked:
            hidden = (distance < 0) | (np.arange(n)[None, :] < np.arange(n)[:, None] // a.window * a.window)
        if a.indexer and max(n, self.context) > a.indexer.top:
            hidden = hidden | self._unchosen(a, a.indexer, h)
        if a.both_ways:
            hidden = np.abs(distance) >= (a.window or n)
        out = np.empty((n, a.heads, a.value_dim), np.float32)
        sinks = self._vector(a.sinks) if a.sinks else np.full(a.heads, -np.inf, np.float32)
        for head in range(a.heads):
            of = head * a.kv_heads // a.heads  # the keys and values that this head shares
            scores = q[:, head] @ k[:, of].T * np.float32(a.scale)
            if cap := np.float32(a.softcap):
                scores = np.tanh(scores / cap) * cap
            if a.slopes:
                scores = scores - np.float32(a.slopes[head]) * np.abs(distance)
            scores = np.where(hidden, -np.inf, scores)
            weights = softmax(np.concatenate([scores, np.full((n, 1), sinks[head])], -1))
            out[:, head] = weights[:, :-1] @ v[:, of]
        result = out.reshape(n, -1)
        if a.gate:
            gate = self._product(h, a.gate)
            gate = np.logaddexp(0, gate).astype(np.float32) if a.gating == "softplus" else sigmoid(gate)
            result = result * (np.repeat(gate, a.value_dim, -1) if a.gate.rows == a.heads else gate)
        return self._product(self._normed(result, a.result_norm, self.spec.eps), a.o, a.o_bias)

    def _attend_latent(self, part: LatentAttention, h: Floats) -> Floats:
        """With keys and values of each head, as the paper has it (DeepSeek-V2, section 2.1)."""
        a, n, y = part, len(h), h
        if a.q_down:
            y = self._normed(self._product(h, a.q_down), a.q_down_norm, self.spec.eps)
        q = self._product(y, a.q).reshape(n, a.heads, a.plain)
        q_rotated = self._rotated(a, self._product(y, a.q_rotated).reshape(n, a.heads, a.rotated))
        latent = self._normed(self._product(h, a.k), a.latent_norm, self.spec.eps)
        k_rotated = self._rotated(a, self._product(h, a.k_rotated)[:, None])[:, 0]
        of_keys = self._matrix(a.of_keys).reshape(a.heads, a.latent, a.plain)
        of_values = self._matrix(a.of_values).reshape(a.heads, a.values, a.latent)
        hidden, out = np.triu(np.ones((n, n), bool), 1), np.empty((n, a.heads, a.values), np.float32)
        if temperature := self.spec.temperature:
            grown = temperature.factors(n)[:, None, None]
            q, q_rotated = q * grown, q_rotated * grown
        for head in range(a.heads):
            scores = q[:, head] @ (latent @ of_keys[head]).T + q_rotated[:, head] @ k_rotated.T
            weights = softmax(np.where(hidden, -np.inf, scores * np.float32(a.scale)))
            out[:, head] = weights @ (latent @ of_values[head].T)
        if a.gate:
            out = out * sigmoid(self._product(h, a.gate))[:, :, None]
        return self._product(out.reshape(n, -1), a.o, a.o_bias)

    def _turned(self, part: Attention, x: Floats, norm: Vector | None) -> Floats:
        if part.rotates_first:
            return self._normed(self._rotated(part, self._heads(part, x, None)), norm, self.spec.eps)
        return self._rotated(part, self._heads(part, x, norm))

    def _heads(self, part: Attention, x: Floats, norm: Vector | None) -> Floats:
        """(n, heads * head_dim) -> (n, heads, head_dim), normed over a head or over all of them."""
        split = x.shape[0], -1, part.head_dim
        if norm and part.own_norms:
            heads = centred(x.reshape(split)) if part.layer_norms else x.reshape(split)
            lengths = np.sqrt((heads * heads).mean(-1, keepdims=True) + np.float32(self.spec.eps))
            return np.asarray(heads / lengths * self._vector(norm).reshape(-1, part.head_dim))
        if norm and norm.size != part.head_dim:
            return self._normed(x, norm, self.spec.eps).reshape(split)
        return self._normed(x.reshape(split), norm, self.spec.eps)

    def _rotated(self, part: Attention | Indexer, x: Floats, apart: int = 1) -> Floats:
        """x (n, heads, head_dim), of every so manyth token. The elements after those of the pairs do not turn."""
        rope = self.spec.ropes[part.rope]
        is_long = self.context > rope.short_context and len(rope.long_frequencies) > 0
        frequencies = np.array(rope.long_frequencies if is_long else rope.frequencies, np.float64)
        angles = apart * np.arange(len(x))[:, None, None] * frequencies
        cos = (np.cos(angles) * rope.magnitude).astype(np.float32)
        sin = (np.sin(angles) * rope.magnitude).astype(np.float32)
        n = len(frequencies)
        first, second = (slice(0, n), slice(n, 2 * n))
        if self.spec.architecture in NEIGHBOURS:
            first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def _unchosen(self, attend: Attention, part: Indexer, h: Floats) -> NDArray[np.bool_]:
        """Which tokens a query does not read: (n, n)."""
        n, blocks, hidden = len(h), len(h) // part.block, np.zeros((len(h), len(h)), bool)
        means = self._product(h, part.k)[: blocks * part.block].reshape(blocks, part.block, -1).mean(1)
        keys = self._rotated(part, self._normed(means[:, None], part.k_norm, self.spec.eps), part.block)[:, 0]
        q = self._product(h, part.q).reshape(n, part.heads, part.size)
        q = self._rotated(part, self._normed(q, part.q_norm, self.spec.eps))
        for token in range(n):
            whole = (token + 1) // part.block
            good = np.maximum(q[token] @ keys[:whole].T, 0).sum(0)
            for block in np.argsort(-good, kind="stable")[part.top // part.block :]:
                hidden[token, block * part.block : (block + 1) * part.block] = True
        return hidden
