"""The transformer's forward pass: llama, qwen2 and qwen3, as tinygrad tensors.

They are one architecture. Where a file holds biases (qwen2) or query and key norms (qwen3) they are applied.
There is one sequence, so activations are (tokens, features), float32.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from engine.events import KernelRole
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.measure.profile import Use
from engine.model.kv_cache import KVCache
from engine.model.weights import Weights


class Layer:
    def __init__(self, weights: Weights, index: int) -> None:
        config, prefix = weights.config, f"blk.{index}."
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def matrix(name: str, rows: int, cols: int) -> QuantizedMatrix:
            return weights.matrix(f"{prefix}{name}.weight", rows, cols)

        def vector(name: str, size: int) -> Tensor | None:
            return weights.vector(f"{prefix}{name}", size)

        self.attn_norm = weights.required_vector(f"{prefix}attn_norm.weight", config.dim)
        self.q, self.q_bias = matrix("attn_q", q_rows, config.dim), vector("attn_q.bias", q_rows)
        self.k, self.k_bias = matrix("attn_k", kv_rows, config.dim), vector("attn_k.bias", kv_rows)
        self.v, self.v_bias = matrix("attn_v", kv_rows, config.dim), vector("attn_v.bias", kv_rows)
        self.q_norm = vector("attn_q_norm.weight", config.head_dim)
        self.k_norm = vector("attn_k_norm.weight", config.head_dim)
        self.o = matrix("attn_output", config.dim, q_rows)
        self.ffn_norm = weights.required_vector(f"{prefix}ffn_norm.weight", config.dim)
        self.gate, self.up = (
            matrix("ffn_gate", config.ffn, config.dim),
            matrix("ffn_up", config.ffn, config.dim),
        )
        self.down = matrix("ffn_down", config.dim, config.ffn)


class Transformer:
    def __init__(self, weights: Weights, cache: KVCache) -> None:
        config = self.config = weights.config
        self.cache = cache
        self.layers = [Layer(weights, i) for i in range(config.layers)]
        self.embedding = weights.matrix("token_embd.weight", config.vocab, config.dim)
        self.output_norm = weights.required_vector("output_norm.weight", config.dim)
        tied = "output.weight" not in weights.file.tensors
        self.output = self.embedding if tied else weights.matrix("output.weight", config.vocab, config.dim)
        angles = np.arange(cache.length)[:, None] * config.rope_frequencies
        self.cos, self.sin = (Tensor(f(angles).astype(np.float32)).realize() for f in (np.cos, np.sin))

    def __call__(self, tokens: Tensor, position: UOp | int) -> Tensor:
        """Runs `tokens` (int32, (n,)) at `position` and the n - 1 after it, stores their keys and values in
        the cache, and gives the last layer's normed output: float32 (n, dim)."""
        return self._norm(self._layers(tokens, position)[0], self.output_norm)

    def store(self, tokens: Tensor, position: UOp | int) -> Tensor:
        """As a call, but only for the keys and values: realize what it returns, the last layer's cache."""
        return self._layers(tokens, position)[1]

    def _layers(self, tokens: Tensor, position: UOp | int) -> tuple[Tensor, Tensor]:
        x, stored = self.embedding.take(tokens), self.cache.layers[-1]
        n = tokens.shape[0]
        mask = Tensor.full((n, position + n), float("-inf")).triu(position + 1)  # no token sees a later one
        for layer, kv in zip(self.layers, self.cache.layers, strict=True):
            attended, stored = self._attention(layer, self._norm(x, layer.attn_norm), kv, position, mask)
            x = x + attended
            h = self._norm(x, layer.ffn_norm)
            gated = layer.gate.product(h).silu() * layer.up.product(h)
            x = (x + layer.down.product(gated)).contiguous()
            x.realize()  # layer by layer: tinygrad schedules the first and finds the others alike
        return x, stored

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (n, dim) -> (n, vocab)."""
        return self.output.product(hidden)

    def uses(self) -> dict[UOp, Use]:
        """What the buffers of the weights and the cache are for."""
        uses: dict[UOp, Use] = {}

        def note(role: KernelRole, *holders: QuantizedMatrix | Tensor | None, **touched: Any) -> None:
            for holder in holders:
                tensors = holder.planes.values() if isinstance(holder, QuantizedMatrix) else [holder]
                uses.update((t.uop.base, Use(role, **touched)) for t in tensors if t is not None)

        note("output head", self.output)
        note("embedding", self.embedding, touched="token", rows=self.config.vocab)
        note("norm", self.output_norm)
        note("attention", self.cos, self.sin, touched="token", rows=self.cache.length)
        note("attention", *self.cache.layers, touched="context", rows=self.cache.length)
        for layer in self.layers:
            note("QKV projection", layer.q, layer.q_bias, layer.k, layer.k_bias, layer.v, layer.v_bias)
            note("attention output", layer.o)
            note("FFN gate+up", layer.gate, layer.up)
            note("FFN down", layer.down)
            note("norm", layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)
        return uses

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x * ((x * x).mean(-1, keepdim=True) + self.config.norm_eps).rsqrt() * weight).contiguous()

    def _rope(self, x: Tensor, position: UOp | int) -> Tensor:
        """Rotates element i of a head with element i + head_dim/2. x: (heads, n, head_dim)."""
        n = x.shape[1]
        cos, sin = (table[position : position + n].unsqueeze(0) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)

    def _attention(
        self, layer: Layer, x: Tensor, kv: Tensor, position: UOp | int, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, n = self.config, cast(int, x.shape[0])

        def heads_of(matrix: QuantizedMatrix, bias: Tensor | None, heads: int) -> Tensor:
            y = matrix.product(x)
            return (y if bias is None else y + bias).reshape(n, heads, c.head_dim).transpose(0, 1)

        q, k, v = (
            heads_of(layer.q, layer.q_bias, c.heads),
            heads_of(layer.k, layer.k_bias, c.kv_heads),
            heads_of(layer.v, layer.v_bias, c.kv_heads),
        )
        if layer.q_norm is not None:
            q = self._norm(q, layer.q_norm)
        if layer.k_norm is not None:
            k = self._norm(k, layer.k_norm)
        q, k = self._rope(q, position), self._rope(k, position)
        new = Tensor.stack(k, v).cast(dtypes.float16)
        stored = Tensor(kv.uop.after(kv[:, :, position : position + n, :].uop.store(new.uop)))
        keys, values = stored[:, :, 0 : position + n, :].cast(dtypes.float32)

        group = c.heads // c.kv_heads  # query heads that share keys and values
        q = q.reshape(c.kv_heads, group * n, c.head_dim) * c.head_dim**-0.5
        scores = q @ keys.transpose(1, 2)
        if n > 1:
            scores = scores.reshape(c.kv_heads, group, n, position + n)
            scores = scores + mask
            scores = scores.reshape(c.kv_heads, group * n, position + n)
        out = scores.softmax(-1) @ values
        out = out.reshape(c.heads, n, c.head_dim).transpose(0, 1).reshape(n, -1)
        return layer.o.product(out), stored
