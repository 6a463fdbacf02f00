"""A float32 pass over a model's description in numpy, to hold the engine against: each sublayer of every architecture.

The description comes from `engine.description.architectures`. All else is its own: the gguf package reads and
dequantizes the weights (`reference_weights`), and the loops are written as the papers say. Attention is in
`reference_attention`, sublayers with a state are in `reference_recurrent`. `tests/model/test_llama_cpp.py` holds all of
it against llama.cpp.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.description.altup import Correction, LowRank, Merge, Modes, Prediction
from engine.description.architectures import read_spec
from engine.description.attention import Attention, LatentAttention
from engine.description.begin import Begin
from engine.description.feed_forward import MIN_PROBABILITY, Dense, Experts, LayerEmbedding, SideBySide
from engine.description.hyper_connections import HashedEmbedding, HyperConnection, Mixing
from engine.description.recurrent import Recurrent
from engine.description.spec import ModelSpec
from engine.description.sublayers import Operator, Vector, Weight
from engine.formats.gguf import GGUF
from tests.reference_attention import AttentionReference
from tests.reference_connections import ConnectedReference
from tests.reference_functions import as_long, centred, gated, log_softmax, sigmoid, softmax, xielu
from tests.reference_recurrent import RecurrentReference
from tests.reference_weights import Floats


class Reference(AttentionReference, ConnectedReference, RecurrentReference):
    """The model of a GGUF file, in a session that was opened with `context` tokens: phi3's rotary embedding depends on
    it. 0 is a short one."""

    pictures: Floats | None = None
    """The embeddings of pictures, zeros where a token is none, float32 (n, `ModelSpec.picture_width`)."""

    def __init__(self, path: Path, context: int = 0) -> None:
        with GGUF(path) as file:
            super().__init__(path, self._read(file))
        self.context = context

    def _read(self, file: GGUF) -> ModelSpec:
        return read_spec(file)

    def logits(self, tokens: Sequence[int], last: int = 0) -> Floats:
        """The logits after each token, or after the last ones: float32 (n, vocab)."""
        *_, x = self._streams(tokens)
        return self.head(x[-last:])

    def head(self, x: Floats) -> Floats:
        """The logits of the last sublayer's stream: (n, dim) -> (n, vocab)."""
        spec = self.spec
        last = None if spec.ends_normed else spec.output_norm
        normed = self._normed(x, last, spec.stream_eps, spec.output_norm_bias)
        y = self._product(normed, spec.head, spec.head_bias)
        cap = np.float32(self.spec.softcap)
        return np.tanh(y / cap) * cap if cap else y

    def pooled(self, tokens: Sequence[int], pooling: str) -> Floats:
        """The embedding of a text, or the classes of one: float32 (dim,) or (classes,)."""
        spec = self.spec
        *_, x = self._streams(tokens)
        x = self._normed(x, spec.output_norm, spec.stream_eps, spec.output_norm_bias)
        first = pooling == "cls" or (pooling == "rank" and spec.both_ways)
        y = x.mean(0) if pooling == "mean" else x[0] if first else x[-1]
        for p in spec.classes if pooling == "rank" else spec.projections:
            y = self._product(y, p.weight, p.bias)
            y = np.tanh(y) if p.tanh else y
        return y

    def streams(self, tokens: Sequence[int]) -> list[Floats]:
        """The residual stream of the tokens after each sublayer, float32 (n, dim) each; first the embedding."""
        return list(self._streams(tokens))

    def drafts(self, tokens: Sequence[int], n: int) -> Iterator[Floats]:
        """The logits of the draft head for `n` tokens after a text, each made of the most probable one before: float32
        (vocab,) each."""
        head, text = self.spec.draft_head, list(tokens)
        assert head and head.join
        join, eps = head.join, head.stream_eps
        *_, x = self._streams(text[:-1])
        before = np.concatenate([np.zeros_like(x[:1]), self._normed(x, join.trunk_norm, eps)])
        for _ in range(n):
            e = self._normed(self._matrix(head.embedding)[text], join.embedding_norm, eps)
            h = self._normed(before, join.hidden_norm, eps)
            x = self._product(e, join.of_embedding) + self._product(h, join.of_hidden)
            *_, x = self._sublayers(head, x, None, [])
            y = self._normed(x[-1:], head.output_norm, eps)
            [logits] = self._product(y, head.head)
            yield logits
            text.append(int(logits.argmax()))
            before = np.concatenate([before, y])

    def caches(self, tokens: Sequence[int]) -> list[tuple[Floats, Floats]]:
        """The keys and values of the tokens that each attention reads, float32 (n, kv_heads, head_dim) each."""
        caches: list[tuple[Floats, Floats]] = []
        collections.deque(self._streams(tokens, caches), 0)
        return caches

    def _streams(
        self, tokens: Sequence[int], caches: list[tuple[Floats, Floats]] | None = None
    ) -> Iterator[Floats]:
        spec = self.spec
        x = self._matrix(spec.embedding)[np.maximum(tokens, 0)] * np.float32(spec.embedding_scale)
        if self.pictures is not None:
            x = np.where(np.array(tokens)[:, None] < 0, self.pictures[:, : spec.dim], x)
        if spec.positions:
            x = x + self._matrix(spec.positions)[: len(x)]
        if spec.token_type:
            x = x + self._matrix(spec.token_type)
        self._embeddings = x
        if spec.embedding_norm:
            x = centred(x) if spec.centred else x
            x = self._normed(x, spec.embedding_norm, spec.eps, spec.embedding_norm_bias)
        x = centred(x) if spec.centred else x
        yield x
        of_layers = self._layer_embeddings(x, tokens) if spec.layer_embeddings else None
        yield from self._sublayers(spec, x, of_layers, [] if caches is None else caches, tokens)

    def _sublayers(
        self,
        spec: ModelSpec,
        x: Floats,
        of_layers: Floats | None,
        caches: list[tuple[Floats, Floats]],
        tokens: Sequence[int] = (),
    ) -> Iterator[Floats]:
        """The stream x after each sublayer. The `caches` of attention are appended."""
        waiting, others, read = np.float32(0), np.empty((0, *x.shape), np.float32), x
        for sublayer, is_added_later in spec.blocks:
            x = self._normed(x, sublayer.renewed, spec.stream_eps, None) if sublayer.renewed else x
            before, read = read, x
            h = self._normed(x, sublayer.norm, spec.stream_eps, sublayer.norm_bias)
            x = h if sublayer.replaces else x
            match sublayer.operator:
                case HyperConnection() | HashedEmbedding() | Mixing() as part:
                    streams = np.concatenate([x[None], others if len(others) else [x] * (part.count - 1)])
                    if isinstance(part, HyperConnection):
                        mixed = self._mixed(part.mixing, streams)
                        y = self._computed(part.of, mixed, mixed, caches)
                        streams = self._connected(part, streams, y)
                    elif isinstance(part, HashedEmbedding):
                        streams = self._hashed_embedding(part, streams, tokens)
                    else:
                        streams[0] = self._mixed(part, streams)
                    y, others = streams[0] - x, streams[1:]
                case LayerEmbedding() as part:
                    assert of_layers is not None
                    gate = self._product(h, part.gate)
                    y = self._product(gated(gate, of_layers[:, part.layer], "gelu"), part.proj)
                case LowRank() as part:
                    y = h + self._normed(
                        self._product(self._product(h, part.left), part.right), part.norm, spec.eps
                    )
                case Prediction() as part:
                    if part.begins:
                        others = np.stack([as_long(self._product(x, weight), x) for weight in part.begins])
                    streams = np.concatenate([x[None], others])
                    mixed = self._modes(part, x).reshape(len(x), part.count, part.count)
                    predicted = streams + np.einsum("tji,itd->jtd", mixed, streams)
                    y, others = predicted[0] - x, predicted[1:]
                case Correction() as part:
                    assert of_layers is not None
                    innovation, correct = x - predicted[0], 1 + self._modes(part, x)
                    corrected = predicted + innovation * correct.T[:, :, None]
                    gate = self._product(corrected[0] * self._vector(part.scale), part.embedding.gate)
                    of_layer = gated(gate, of_layers[:, part.embedding.layer], "gelu")
                    added = self._product(of_layer, part.embedding.proj)
                    others = corrected[1:] + self._normed(added, part.embedding_norm, spec.eps)
                    y = corrected[0] - x
                case Begin():
                    y = self._embeddings
                case Merge() as part:
                    ends = [as_long(self._product(o, w), x) for o, w in zip(others, part.ends, strict=True)]
                    y = np.mean([x, *ends], 0) - x
                case part:
                    y = self._computed(part, h, before, caches)
            y = self._normed(y, sublayer.post_norm, spec.post_eps or spec.eps)
            if is_added_later:
                waiting = waiting + y
                yield x
                continue
            x, waiting = (x + y + waiting) * np.float32(sublayer.factor), np.float32(0)
            x = centred(x) if spec.centred else x
            if sublayer.scale:
                x = x * self._vector(sublayer.scale)
            if sublayer.picture_part and self.pictures is not None:
                x = x + self.pictures[:, sublayer.picture_part * spec.dim :][:, : spec.dim]
            yield x

    def _computed(
        self, part: Operator, h: Floats, before: Floats, caches: list[tuple[Floats, Floats]]
    ) -> Floats:
        """What a sublayer makes of h, or of `before` that where its experts are chosen so."""
        match part:
            case LatentAttention():
                return self._attend_latent(part, h)
            case Attention():
                return self._attend(part, h, caches)
            case Recurrent():
                return self._recurrent(part, h)
            case Dense():
                return self._dense(part, h)
            case Experts():
                return self._experts(part, h, before if part.routes_before else h)
            case SideBySide():
                return self._beside(part, h)
        raise NotImplementedError(part)

    def _modes(self, part: Modes, x: Floats) -> Floats:
        modes = np.tanh(self._product(self._normed(x, part.router_norm, self.spec.eps), part.router))
        return modes @ self._vector(part.coefficients).reshape(-1, part.count).T

    def routers(self, streams: Sequence[Floats]) -> list[Floats]:
        """The log-probabilities of the experts in each mixture of experts, or what else they are chosen by, float32
        (n, experts), for these residual streams before the sublayers."""
        found = []
        befores = [streams[0], *streams]
        for sublayer, x, before in zip(self.spec.sublayers, streams, befores, strict=False):
            if isinstance(part := sublayer.operator, Experts) and part.routes_before:
                found.append(self._router(before, None, part))
            elif isinstance(sublayer.operator, Experts):
                found.append(self._router(x, sublayer.norm, sublayer.operator, sublayer.norm_bias))
            elif isinstance(sublayer.operator, SideBySide):
                found.append(self._router(x, sublayer.operator.router_scale, sublayer.operator.experts))
        return found

    def expert_scales(self, part: Experts) -> Floats:
        """What the results of the experts are multiplied by, beside their probabilities: float32 (experts,)."""
        return self._vector(part.scales) if part.scales else np.ones(part.count, np.float32)

    def _router(
        self, x: Floats, norm: Vector | None, part: Experts, norm_bias: Vector | None = None
    ) -> Floats:
        h = self._normed(x, norm, self.spec.stream_eps)
        h = h if norm_bias is None else h + self._vector(norm_bias)
        logits = self._product(h, part.router, part.router_bias)
        if part.is_plain:
            return log_softmax(logits).astype(np.float32)
        return np.stack([self._ranked(part, scores) for scores in self._scores(part, logits)])

    # --- sublayers ---------------------------------------------------------------------------------------

    def _layer_embeddings(self, x: Floats, tokens: Sequence[int]) -> Floats:
        """What the tokens of the embeddings x give each layer: (n, layers, size)."""
        of = self.spec.layer_embeddings
        assert of
        shape = len(x), of.layers, of.size
        projected = self._product(x, of.projection).reshape(shape) / np.float32(self.spec.dim**0.5)
        table = self._matrix(of.table)[np.maximum(tokens, 0)].reshape(shape) * np.float32(of.size**0.5)
        return (self._normed(projected, of.norm, self.spec.eps) + table) / np.float32(2**0.5)

    def _beside(self, part: SideBySide, x: Floats) -> Floats:
        of_dense, of_experts, of_router = (
            self._normed(x, norm, self.spec.stream_eps)
            for norm in (part.dense_norm, part.experts_norm, part.router_scale)
        )
        dense = self._normed(self._dense(part.dense, of_dense), part.dense_post_norm, self.spec.eps)
        experts = self._experts(part.experts, of_experts, of_router)
        return dense + self._normed(experts, part.experts_post_norm, self.spec.eps)

    def _experts(self, part: Experts, h: Floats, of_router: Floats) -> Floats:
        router = self._scores(part, self._product(of_router, part.router, part.router_bias))
        of_experts = self._product(h, part.narrow[0]) if part.narrow else h
        y = np.zeros_like(of_experts)
        scales = self.expert_scales(part)
        for token, (x, probabilities) in enumerate(zip(of_experts, router, strict=True)):
            chosen = np.argsort(-self._ranked(part, probabilities), kind="stable")[: part.used]
            total = np.maximum(probabilities[chosen].sum(), np.float32(MIN_PROBABILITY))
            if part.weighed_inputs:
                x, probabilities = x * probabilities[chosen], np.ones_like(probabilities)
            for expert in chosen:

                def product(x: Floats, weight: Weight, bias: Vector | None, expert: int = expert) -> Floats:
                    y = self._matrix(weight)[expert * weight.rows : (expert + 1) * weight.rows] @ x
                    return y + self._tensors[bias.tensor][expert] if bias else y

                first, *others = (product(x, weight, bias) for weight, bias in part.firsts)
                hidden = gated(first, others[0] if others else np.ones_like(first), part.activation)
                out = product(hidden, part.down, part.down_bias)
                out = out * scales[expert] * np.float32(part.factor)
                y[token] += out * probabilities[expert] / (total if part.renormalised else np.float32(1))
        if part.narrow:
            y = self._product(y, part.narrow[1])
        if part.shared:
            of_all = self._dense(part.shared, h)
            y += of_all * sigmoid(self._product(h, part.shared_gate)) if part.shared_gate else of_all
        return y

    @staticmethod
    def _scores(part: Experts, logits: Floats) -> Floats:
        return softmax(logits) if part.scoring == "softmax" else sigmoid(logits)

    def _ranked(self, part: Experts, scores: Floats) -> Floats:
        """What the experts of a token are chosen by, from their probabilities, float32 (experts,)."""
        ranked = scores + self._vector(part.choice_bias) if part.choice_bias else scores
        groups = ranked.reshape(part.groups, -1)
        if part.groups > 1:
            best_two = np.sort(groups, -1)[:, -2:].sum(-1)
            left_out = np.argsort(-best_two, kind="stable")[part.used_groups :]
            groups = groups.copy()
            groups[left_out] = -np.inf
        return groups.reshape(-1)

    def _dense(self, part: Dense, h: Floats) -> Floats:
        up = self._product(h, part.up, part.up_bias)
        gate = self._product(h, part.gate, part.gate_bias) if part.gate else up
        up = up if part.gate else np.ones_like(up)
        if part.sparsity:
            least = gate.mean(-1, keepdims=True) + np.float32(part.sparsity) * gate.std(
                -1, keepdims=True, ddof=1
            )
            gate = np.maximum(gate - least, 0)
        hidden = xielu(gate, *part.curve) if part.curve else gated(gate, up, part.activation)
        return self._product(self._normed(hidden, part.hidden_norm, self.spec.eps), part.down, part.down_bias)


def wrong_by(log_probabilities: Floats, chosen: NDArray[Any]) -> Floats:
    """By how much the likeliest of the experts that a token should have taken instead leads the least likely that it
    took: at most 0 if `chosen` (n, used) are the likeliest experts. Raises AssertionError if an expert is there
    twice."""
    taken = np.zeros(log_probabilities.shape, bool)
    np.put_along_axis(taken, chosen.astype(np.int64), True, -1)
    assert (taken.sum(-1) == chosen.shape[-1]).all()
    left, least = (np.where(taken, -np.inf, log_probabilities), np.where(taken, log_probabilities, np.inf))
    return np.asarray(left.max(-1) - least.min(-1), np.float32)


def divergence(p_logits: ArrayLike, q_logits: ArrayLike) -> Any:
    """Kullback-Leibler divergence of q from p, in nats, for each row."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return (np.exp(p) * (p - q)).sum(-1)
