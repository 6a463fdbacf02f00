"""Several residual streams, and hashes of tokens, for `reference`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.description.hyper_connections import HashedEmbedding, HyperConnection, Mixing
from engine.description.spec import HashedRows
from engine.description.sublayers import Vector
from tests.reference_functions import sigmoid
from tests.reference_weights import Floats, ReferenceWeights


class ConnectedReference(ReferenceWeights):
    """Each as its class's docstring has it, of streams (count, n, dim)."""

    def _normed_streams(self, streams: Floats, norm: Vector) -> Floats:
        weights = self._vector(norm).reshape(len(streams), -1)
        lengths = np.sqrt((streams * streams).mean(-1, keepdims=True) + np.float32(self.spec.eps))
        return np.asarray(streams / lengths * weights[:, None])

    def _mixed(self, part: Mixing, streams: Floats) -> Floats:
        n = self._normed_streams(streams, part.norm)
        low = self._product(np.concatenate([*n], -1), part.down) / np.float32(part.count)
        gates = np.split(sigmoid(self._product(low * sigmoid(low), part.up)), part.count, -1)
        return np.asarray(np.mean([x * gate for x, gate in zip(n, gates, strict=True)], 0))

    def _connected(self, part: HyperConnection, streams: Floats, y: Floats) -> Floats:
        n = np.concatenate([*self._normed_streams(streams, part.mixing.norm)], -1)
        shares = 2 * sigmoid(self._product(n, part.inject) / np.float32(part.mixing.count))
        return streams + y * shares.T[:, :, None]

    def _hashed_embedding(self, part: HashedEmbedding, streams: Floats, tokens: Sequence[int]) -> Floats:
        hashed = self.spec.hashed
        assert hashed
        table = self._matrix(hashed.table)
        e = np.stack([table[hashed_rows(hashed, tokens[: i + 1])].reshape(-1) for i in range(len(tokens))])
        key = np.stack(np.split(self._product(e, part.key), part.count, -1))
        key, query = self._normed_streams(key, part.key_norm), self._normed_streams(streams, part.query_norm)
        a = (key * query).sum(-1, keepdims=True) / np.float32(streams.shape[-1] ** 0.5)
        gated = sigmoid(np.sign(a) * np.sqrt(np.maximum(np.abs(a), 1e-6))) * self._product(e, part.value)
        inputs = self._normed_streams(gated, part.conv_norm)
        taps = self._vector(part.conv).reshape(part.count, -1, part.taps)
        y = np.zeros_like(gated)
        for tap in range(part.taps):
            back = (part.taps - 1 - tap) * part.dilation
            y[:, back:] += inputs[:, : inputs.shape[1] - back] * taps[:, None, :, tap]
        return streams + gated + y * sigmoid(y)


def hashed_rows(of: HashedRows, text: Sequence[int]) -> list[int]:
    """The rows of the last token of a text."""
    context = [text[-1]]
    for token in text[-2::-1]:
        if token == of.end:
            break
        context.append(token)
    context += [of.end] * len(of.multipliers)
    rows = []
    for n in range(2, len(of.multipliers) + 1):
        mixed = 0
        for token, multiplier in zip(context[:n], of.multipliers, strict=False):
            mixed ^= token * multiplier % (1 << 64)
        for head in range((n - 2) * of.each, (n - 1) * of.each):
            rows.append(mixed % of.sizes[head] + of.offsets[head])
    return rows
