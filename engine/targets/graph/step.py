"""A model as tensor graphs: every part of a description, on every device that tinygrad supports.

There is one sequence, so activations are float32 (tokens, features).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from engine.description.altup import Correction, LowRank, Merge, Prediction
from engine.description.attention import Attention, LatentAttention
from engine.description.begin import Begin
from engine.description.feed_forward import Dense, Experts, LayerEmbedding, SideBySide
from engine.description.hyper_connections import HashedEmbedding, HyperConnection, Mixing
from engine.description.older_time_mixing import OlderTimeMix
from engine.description.recurrent import DeltaNet, KeyedDeltaNet, Mamba, SelectiveScan, ShortConv
from engine.description.sublayers import Operator, Vector, Weight
from engine.description.time_mixing import ChannelMix, TimeMix
from engine.formats.kv_format import KVFormat
from engine.kernels.device_memory import free_cached_memory
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading.weights import Weights
from engine.measure.kernel_roles import BufferUse
from engine.runtime.kv_blocks import BLOCK
from engine.targets.buffer_uses import BufferUses
from engine.targets.graph.cached import dequantized, mask_of, quantized, stored_in
from engine.targets.graph.chosen_tokens import ChosenTokens, index_caches
from engine.targets.graph.feed_forward import FeedForwardLayers
from engine.targets.graph.hyper_connections import ConnectedLayers
from engine.targets.graph.inputs import Step
from engine.targets.graph.parts import Run, centred, load_matrix, normed
from engine.targets.graph.recurrent import RecurrentLayers
from engine.targets.graph.states import States
from engine.targets.graph.streams import StreamLayers
from engine.targets.graph.time_mixing import MixingLayers


class Transformer(
    RecurrentLayers, FeedForwardLayers, StreamLayers, ConnectedLayers, ChosenTokens, MixingLayers
):
    """A model's weights and KV cache, and its forward pass over tokens that continue those in the cache. The cache has
    `blocks` of BLOCK places for tokens: for each attention (2, kv_heads, places, head_dim), zeros, in float16, or in
    float32 if the weights are. In the format q8_0 it is int8, and the scales of a head's blocks, as bytes, follow its
    elements: (2, kv_heads, places, 34 / 32 * head_dim). Each of `sequences` has a recurrent state, and up to `length`
    tokens, those that fill a step included. `context`: the session's, which rotary embeddings may depend on.

    The embeddings of layers stay in the file: each step gets the rows of its tokens (`rows_of`)."""

    def __init__(
        self, weights: Weights, length: int, context: int, sequences: int, blocks: int, kv: KVFormat
    ) -> None:
        """Raises ModelFileError."""
        spec = self.spec = weights.spec
        self.length, self.places = length, blocks * BLOCK
        mapped = [weights.mapped(table) for table in spec.host_tables]
        self._table = mapped[0] if mapped else None
        self._no_rows = Tensor(np.zeros(1, np.uint8)).realize()
        loaded = (weight for weight in spec.weights() if weight not in spec.host_tables)
        self._matrices = {weight: load_matrix(weights, weight) for weight in loaded}
        free_cached_memory()  # copies of pieces of the file
        self._vectors = {vector: Tensor(weights.vector(vector)).realize() for vector in spec.vectors()}
        tables = [rope.tables(length, context) for rope in spec.ropes]
        self._ropes = [(Tensor(cos).realize(), Tensor(sin).realize()) for cos, sin in tables]
        self._temperatures = None
        if spec.temperature:
            self._temperatures = Tensor(spec.temperature.factors(length)).realize()
        floats = dtypes.float32 if spec.is_float32 else dtypes.float16
        self._kv_type = dtypes.int8 if kv.is_quantized else floats
        widths = [kv.bytes(a.head_dim) if kv.is_quantized else a.head_dim for a in spec.caching]
        self._caches = [
            Tensor.zeros(2, a.kv_heads, self.places, width, dtype=self._kv_type).contiguous()
            for a, width in zip(spec.caching, widths, strict=True)
        ]
        self._index_caches = index_caches(spec, self.places)
        self._context = context
        self._numbers = Tensor(np.arange(length, dtype=np.int32))
        Tensor.realize(self._numbers, *self._caches)
        self.states = [States.zeros(operator, sequences) for operator in spec.recurrent]

    def rows_of(self, tokens: Sequence[int], before: Sequence[int]) -> Tensor:
        """What a step of these tokens, negative in pictures, reads of the table that stays in the file, as the file
        holds it: uint8 (bytes,), of one byte if the model has none. `before`: the last tokens before them."""
        if self._table is None:
            return self._no_rows
        hashed = self.spec.hashed
        rows = hashed.rows(before, tokens) if hashed else np.maximum(tokens, 0)
        return Tensor(self._table[rows].reshape(-1)).realize()

    def _embeddings(self, step: Step) -> Tensor:
        """Those of a step's tokens, float32 (n, dim)."""
        tokens, scale = step.tokens, self.spec.embedding_scale
        if step.of_pictures is not None:
            tokens = tokens.maximum(0)
        x = self._matrices[self.spec.embedding].take(tokens).contiguous()
        x = x if scale == 1 else x * scale
        if step.of_pictures is not None:
            x = (step.tokens < 0).unsqueeze(-1).where(self._picture_part(step.of_pictures, 0), x)
        if self.spec.positions:
            n: int = tokens.shape[0]
            places = self._numbers[step.position : step.position + n].minimum(self.spec.positions.rows - 1)
            x = x + self._matrices[self.spec.positions].take(places)
        if self.spec.token_type:
            x = x + self._matrices[self.spec.token_type].dequantize()
        return x

    def embedded(self, step: Step) -> Tensor:
        """What the stream begins with, float32 (n, dim)."""
        return self._begun(self._embeddings(step))

    def _begun(self, x: Tensor) -> Tensor:
        """What the stream begins with, of the embeddings x (n, dim)."""
        if self.spec.embedding_norm:
            x = centred(x) if self.spec.centred else x
            x = self._stream_norm(x, self.spec.embedding_norm, self.spec.embedding_norm_bias)
        return centred(x).contiguous() if self.spec.centred else x

    def __call__(self, step: Step) -> Tensor:
        """Runs a step. Stores its keys and values in the cache and returns the normed output of the last sublayer,
        float32 (n, dim)."""
        *_, (x, _) = self.sublayers(step)
        spec = self.spec
        return x if spec.ends_normed else self._stream_norm(x, spec.output_norm, spec.output_norm_bias)

    def store(self, step: Step) -> Tensor:
        """Runs a step of a prompt; returns the last cache that it is stored in. What follows a prompt does not need,
        and it is not computed."""
        last = self.spec.last_keeping
        return [stored for _, (_, stored) in zip(range(last + 1), self.sublayers(step), strict=False)][-1]

    def copy_block(self, source: UOp, target: UOp) -> None:
        """Copies the keys and values of a block in all layers."""
        for cache in (*self._caches, *self._index_caches):
            block = cache[:, :, source * BLOCK : source * BLOCK + BLOCK].contiguous().realize()
            stored = cache[:, :, target * BLOCK : target * BLOCK + BLOCK].uop.store(block.uop)
            Tensor(cache.uop.after(stored)).realize()

    def clear_block(self, target: int) -> None:
        """Makes the keys and values of a block zeros in all layers."""
        for cache in (*self._caches, *self._index_caches):
            block = cache[:, :, target * BLOCK : target * BLOCK + BLOCK]
            stored = block.uop.store(block.const_like(0).uop)
            Tensor(cache.uop.after(stored)).realize()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (n, dim) -> (n, vocab)."""
        logits, cap = self._product(self.spec.head, hidden, self.spec.head_bias), self.spec.softcap
        return (logits / cap).tanh() * cap if cap else logits

    def uses(self) -> BufferUses:
        """The uses of the weights and of the cache."""
        uses, spec = BufferUses(), self.spec
        uses.add(BufferUse("output head"), *self._planes(spec.head))
        uses.add(BufferUse("embedding", "token", spec.vocab), *self._planes(spec.embedding))
        if spec.layer_embeddings:
            uses.add(BufferUse("embedding"), *self._planes(spec.layer_embeddings.projection))
        for operator in spec.operators:
            for role, weights in operator.roles.items():
                uses.add(BufferUse(role), *(plane for w in weights if w for plane in self._planes(w)))
        uses.add(BufferUse("norm"), *self._vectors.values())
        for a in spec.attention:
            biases = (self._vectors[bias] for bias in (a.q_bias, a.k_bias, a.v_bias) if bias)
            uses.add(BufferUse("QKV projection"), *biases)
        for e in spec.experts:
            gate_up, down = (self._of_experts(*pairs) for pairs in (e.firsts, [(e.down, e.down_bias)]))
            uses.add_experts(e, 1, gate_up, down)
        uses.add(BufferUse("attention", "token", self.length), *(t for pair in self._ropes for t in pair))
        uses.add(BufferUse("attention", "token", self.length), self._temperatures)
        uses.add(BufferUse("attention", "context", self.places), *self._caches, *self._index_caches)
        uses.add(BufferUse("delta net", "token"), *(t for state in self.states for t in state.tensors))
        return uses

    def _planes(self, weight: Weight) -> Iterable[Tensor]:
        return self._matrices[weight].planes.values()

    def _of_experts(self, *pairs: tuple[Weight, Vector | None]) -> Iterator[Tensor]:
        """The buffers of matrices and their biases."""
        for weight, bias in pairs:
            yield from self._planes(weight)
            if bias:
                yield self._vectors[bias]

    def sublayers(self, step: Step) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs a step as `__call__` does. Gives for each sublayer the residual stream after it, (n, dim), and the cache
        that was stored to last."""
        spec = self.spec
        embeddings, n = self._embeddings(step), cast(int, step.tokens.shape[0])
        x = self._begun(embeddings)
        run = Run(
            step,
            {
                kind: self._mask(n, step, *kind)
                for kind in {(a.window, a.looks_ahead, a.chunked) for a in spec.attention}
            },
            self._layer_embeddings(x, step.rows) if spec.layer_embeddings else [],
            iter(self._caches),
            iter(self._index_caches),
            iter(self.states),
            [self._numbers, *self._caches][-1],
        )
        waiting: list[Tensor] = []
        run.embeddings, read = embeddings, x
        for sublayer, is_added_later in spec.blocks:
            norm, operator = sublayer.norm, sublayer.operator
            x = self._stream_norm(x, sublayer.renewed) if sublayer.renewed else x
            run.before, read = read, x
            h = x if norm is None else self._stream_norm(x, norm, sublayer.norm_bias)
            x = h if sublayer.replaces else x
            y = self._computed(operator, h, run)
            y = y if sublayer.post_norm is None else self._norm(y, sublayer.post_norm, spec.post_eps or None)
            if is_added_later:
                waiting.append(y.contiguous())
                yield x, run.stored
                continue
            x = x + sum(waiting, start=y)
            waiting.clear()
            x = x * sublayer.factor if sublayer.factor != 1 else x
            x = centred(x) if spec.centred else x
            if sublayer.scale:
                x = x * self._vectors[sublayer.scale]
            if sublayer.picture_part and step.of_pictures is not None:
                x = x + self._picture_part(step.of_pictures, sublayer.picture_part)
            if not isinstance(operator, Attention):
                x = x.contiguous()
                x.realize()  # layer by layer, so that tinygrad schedules the first and reuses that for the others
            yield x, run.stored

    def _computed(self, operator: Operator, x: Tensor, run: Run) -> Tensor:
        return _SUBLAYERS[type(operator)](self, operator, x, run)

    def _picture_part(self, of_pictures: Tensor, part: int) -> Tensor:
        return of_pictures[:, part * self.spec.dim : (part + 1) * self.spec.dim]

    def _layer_embeddings(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        """What the tokens of the embeddings x (n, dim) give each layer, (n, size) each."""
        of, n = self.spec.layer_embeddings, cast(int, x.shape[0])
        assert of
        projected = self._product(of.projection, x) * self.spec.dim**-0.5
        projected = self._norm(projected.reshape(n, of.layers, of.size), of.norm)
        table = QuantizedMatrix(of.table.type, n, of.table.cols).dequantize_rows(rows, n)
        e = (projected + table.reshape(n, of.layers, of.size) * of.size**0.5) * 0.5**0.5
        e = e.contiguous().realize()
        return [e[:, i] for i in range(of.layers)]

    def _begin(self, operator: Begin, x: Tensor, run: Run) -> Tensor:
        assert run.embeddings is not None
        return run.embeddings

    def _layer_embedding(self, operator: LayerEmbedding, x: Tensor, run: Run) -> Tensor:
        gate = self._product(operator.gate, x).gelu()
        return self._product(operator.proj, gate * run.of_layers[operator.layer])

    def _heads(self, x: Tensor, n_heads: int, norm: Vector | None, a: Attention | None = None) -> Tensor:
        """(n, n_heads * head_dim) -> (n_heads, n, head_dim), normed over a head or over all of them. Heads of `a` may
        have weights of their own."""
        n, width = x.shape
        if norm and a and a.own_norms:
            heads = x.reshape(n, n_heads, -1).transpose(0, 1)
            own = self._vectors[norm].reshape(n_heads, 1, -1)
            return normed(centred(heads) if a.layer_norms else heads, self.spec.eps) * own
        if norm and norm.size == width:
            x = self._norm(x, norm)
        heads = x.reshape(n, n_heads, -1).transpose(0, 1)
        return self._norm(heads, norm) if norm and norm.size != width else heads

    def _mask(self, n: int, step: Step, window: int, looks_ahead: bool, chunked: bool) -> Tensor | None:
        """See `mask_of`."""
        unseen = self._unseen(step, window) if looks_ahead else None
        if not chunked:
            return mask_of(n, step.position, window, unseen)
        position = step.position
        first = self._numbers[position : position + n] // window * window
        is_before = self._numbers[: position + n].unsqueeze(0) < first.unsqueeze(1)
        causal = mask_of(n, position, 0, unseen)
        hidden = is_before.where(-math.inf, 0.0)
        return hidden if causal is None else causal + hidden

    def _unseen(self, step: Step, window: int) -> Tensor | None:
        """Where the tokens of a step see no token, (n, position + n); None if each sees those up to its own."""
        if step.seen is None:
            return None
        n, seen = cast(int, step.tokens.shape[0]), step.seen
        if window and self.spec.both_ways:
            seen = seen.minimum(self._numbers[step.position : step.position + n] + window)
        return self._numbers[: step.position + n].unsqueeze(0) >= seen.unsqueeze(1)

    def _turned(self, a: Attention, x: Tensor, n_heads: int, norm: Vector | None, step: Step) -> Tensor:
        """Queries or keys of x (n, n_heads * head_dim), normed and rotated: (n_heads, n, head_dim)."""
        if not (norm and a.rotates_first):
            return self._rotated(self._heads(x, n_heads, norm, a), a.rope, step)
        return self._norm(self._rotated(self._heads(x, n_heads, None), a.rope, step), norm)

    def _rotated(self, x: Tensor, rope: int, step: Step) -> Tensor:
        """Rotary position embedding of x (heads, n, head_dim): rotates element i with element i + head_dim / 2."""
        n, position = x.shape[1], step.position
        cos, sin = (table[position : position + n].unsqueeze(0) for table in self._ropes[rope])
        if step.cos is not None and step.sin is not None and self.spec.ropes[rope].sections:
            cos, sin = step.cos.unsqueeze(0), step.sin.unsqueeze(0)
        a, b = x.chunk(2, dim=-1)
        return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)

    def _attention(self, a: Attention, x: Tensor, run: Run) -> Tensor:
        """The output projection of attention over x (n, dim), which is normed."""
        step, new = run.step, None
        q = self._turned(a, self._cut(a, a.q, x, a.q_bias), a.heads, a.q_norm, step)
        if a.k:
            projected = self._cut(a, a.k, x, a.k_bias)
            k = self._turned(a, projected, a.kv_heads, a.k_norm, step)
            v = self._heads(self._cut(a, a.v, x, a.v_bias) if a.v else projected, a.kv_heads, None)
            if a.has_normed_values:
                v = normed(v, self.spec.eps)
            if not a.has_plain_values:
                v = (v * a.value_factor).pad((None, None, (0, a.head_dim - a.value_dim)))
            new = Tensor.stack(k, v)
        unchosen = self._unchosen(a.indexer, x, run, self._context) if a.indexer else None
        out = self._attended(a, q, new, run, unchosen)[..., : a.value_dim]
        out = out.transpose(0, 1).reshape(x.shape[0], -1)
        if a.gate:
            gate = self._product(a.gate, x)
            gate = gate.softplus() if a.gating == "softplus" else gate.sigmoid()
            shape = x.shape[0], a.gate.rows, -1
            out = (out.reshape(shape) * gate.unsqueeze(-1)).reshape(x.shape[0], -1)
        out = self._norm(out, a.result_norm) if a.result_norm else out
        return self._product(a.o, out, a.o_bias)

    def _cut(self, a: Attention, weight: Weight, x: Tensor, bias: Vector | None) -> Tensor:
        """Queries, keys or values, within the limit."""
        y = self._product(weight, x, bias)
        return y.clamp(-a.limit, a.limit) if a.limit else y

    def _latent_attention(self, a: LatentAttention, x: Tensor, run: Run) -> Tensor:
        """As `_attention`. The rotated elements of a head come in two halves, each before one of the latent elements,
        so that those of a pair are half a head apart."""
        n, step = cast(int, x.shape[0]), run.step
        y = self._norm(self._product(a.q_down, x), a.q_down_norm) if a.q_down and a.q_down_norm else x

        def whole(rotated: Tensor, latent: Tensor) -> Tensor:
            halves = *rotated.chunk(2, dim=-1), *latent.chunk(2, dim=-1)
            return halves[0].cat(halves[2], halves[1], halves[3], dim=-1)

        plain = self._heads(self._product(a.q, y), a.heads, None)
        latent = self._product_of_heads(a.of_keys, plain, a.heads)
        q = whole(self._heads(self._product(a.q_rotated, y), a.heads, None), latent)
        k_rotated = self._product(a.k_rotated, x).reshape(1, n, a.rotated)
        k = whole(k_rotated, self._norm(self._product(a.k, x), a.latent_norm).reshape(1, n, a.latent))
        q, new = self._rotated(q, a.rope, step), Tensor.stack(self._rotated(k, a.rope, step), k)
        lower, upper = self._attended(a, q, new, run).chunk(2, dim=-1)
        out = lower[..., a.rotated // 2 :].cat(upper[..., a.rotated // 2 :], dim=-1)
        out = self._product_of_heads(a.of_values, out, a.heads).transpose(0, 1)
        out = out * self._product(a.gate, x).sigmoid().unsqueeze(-1) if a.gate else out
        return self._product(a.o, out.reshape(n, -1), a.o_bias)

    def _product_of_heads(self, weight: Weight, x: Tensor, heads: int) -> Tensor:
        """Each head's matrix times its vectors: x (heads, n, cols) -> (heads, n, rows)."""
        matrices = self._matrices[weight].dequantize().reshape(heads, weight.rows, weight.cols)
        return (x @ matrices.transpose(1, 2)).contiguous()

    def _attended(
        self, a: Attention, q: Tensor, new: Tensor | None, run: Run, unchosen: Tensor | None = None
    ) -> Tensor:
        """The weighted sums of values for the queries q, (heads, n, head_dim). The `new` keys and values (2, kv_heads,
        n, head_dim) are stored in the layer's cache. The mask, if any, is added to the scores, (n, position + n), and
        so is what says which tokens are `unchosen`."""
        run.read.append(next(run.caches) if a.cache_of is None else run.read[a.cache_of])
        kv, mask, step = run.read[-1], run.masks[a.window, a.looks_ahead, a.chunked], run.step
        n, position = cast(int, q.shape[1]), step.position
        if unchosen is not None:
            mask = unchosen if mask is None else mask + unchosen
        if self._temperatures is not None and a.tempered:
            q = q * self._temperatures[position : position + n].reshape(1, n, 1)
        if new is not None:
            new = quantized(new) if self._kv_type == dtypes.int8 else new.cast(self._kv_type)
            kv = run.stored = stored_in(kv, new, step)
        cached = kv[:, :, step.places[0 : position + n]]
        if self._kv_type == dtypes.int8:
            cached = dequantized(cached, a.head_dim)
        keys, values = cached.cast(dtypes.float32)

        group = a.heads // a.kv_heads  # query heads that share keys and values
        q = q.reshape(a.kv_heads, group * n, a.head_dim) * a.scale
        scores = q @ keys.transpose(1, 2)
        if a.softcap:
            scores = (scores / a.softcap).tanh() * a.softcap
        if mask is not None or a.slopes:
            scores = scores.reshape(a.kv_heads, group, n, position + n)
            scores = scores if mask is None else scores + mask
            if a.slopes:
                own = self._numbers[position : position + n].unsqueeze(1)
                distance = (own - self._numbers[: position + n].unsqueeze(0)).abs().cast(dtypes.float32)
                slopes = Tensor(np.array(a.slopes, np.float32)).reshape(a.kv_heads, group, 1, 1)
                scores = scores - slopes * distance
            scores = scores.reshape(a.kv_heads, group * n, position + n)
        if a.sinks:
            sinks = self._vectors[a.sinks].reshape(a.kv_heads, group, 1).expand(-1, -1, n)
            sinks = sinks.reshape(a.kv_heads, group * n, 1)
            weights = scores.cat(sinks, dim=-1).softmax(-1).shrink_to(None, None, position + n)
        else:
            weights = scores.softmax(-1)
        return (weights @ values).reshape(a.heads, n, a.head_dim)


_SUBLAYERS: dict[type[Operator], Callable[[Transformer, Any, Tensor, Run], Tensor]] = {
    Attention: Transformer._attention,
    LatentAttention: Transformer._latent_attention,
    DeltaNet: Transformer._delta,
    KeyedDeltaNet: Transformer._keyed_delta,
    Mamba: Transformer._mamba,
    SelectiveScan: Transformer._scan,
    ShortConv: Transformer._short_conv,
    Dense: Transformer._dense,
    Experts: Transformer._experts,
    SideBySide: Transformer._beside,
    LayerEmbedding: Transformer._layer_embedding,
    LowRank: Transformer._low_rank,
    Prediction: Transformer._predict,
    Correction: Transformer._correct,
    Merge: Transformer._merge,
    HyperConnection: Transformer._connected,
    Mixing: Transformer._mixed_at_last,
    HashedEmbedding: Transformer._hashed_embedding,
    TimeMix: Transformer._time_mix,
    ChannelMix: Transformer._channel_mix,
    OlderTimeMix: Transformer._older_time_mix,
    Begin: Transformer._begin,
}
"""What computes each kind of sublayer: of x (n, dim), normed if the sublayer has a norm, (n, dim)."""
