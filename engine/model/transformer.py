"""The transformer's forward pass as tensor graphs: llama, qwen2 and qwen3.

These are one architecture: biases (qwen2) and norms of queries and keys (qwen3) are applied if the file has them.
There is one sequence, so activations are float32 (tokens, features).
"""

from __future__ import annotations

from typing import cast

from tinygrad import Tensor, UOp, dtypes

from engine.formats.rope_order import half_split
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.measure.kernel_roles import BufferUse
from engine.model.buffer_uses import BufferUses
from engine.model.config import ModelConfig
from engine.model.weights import Weights


def _load_matrix(weights: Weights, name: str, rows: int, cols: int) -> QuantizedMatrix:
    ggml_type, interleaved = weights.matrix_type(name, rows, cols)
    raw = Tensor(weights.matrix_bytes(name, rows, cols))
    if interleaved:
        raw = half_split(raw.reshape(rows, -1), weights.config.head_dim).flatten()
    return QuantizedMatrix(raw, ggml_type, rows, cols).realize()


def _load_vector(weights: Weights, name: str, size: int) -> Tensor:
    return Tensor(weights.vector(name, size)).realize()


class Layer:
    """The weights of a layer. Raises ModelFileError."""

    def __init__(self, weights: Weights, index: int) -> None:
        config, prefix = weights.config, f"blk.{index}."
        dim, ffn, query_size, kv_size = config.dim, config.ffn, config.query_size, config.kv_size

        def matrix(name: str, rows: int, cols: int) -> QuantizedMatrix:
            return _load_matrix(weights, f"{prefix}{name}.weight", rows, cols)

        def optional_vector(name: str, size: int) -> Tensor | None:
            return _load_vector(weights, prefix + name, size) if prefix + name in weights else None

        self.attn_norm = _load_vector(weights, f"{prefix}attn_norm.weight", dim)
        self.q, self.q_bias = matrix("attn_q", query_size, dim), optional_vector("attn_q.bias", query_size)
        self.k, self.k_bias = matrix("attn_k", kv_size, dim), optional_vector("attn_k.bias", kv_size)
        self.v, self.v_bias = matrix("attn_v", kv_size, dim), optional_vector("attn_v.bias", kv_size)
        self.q_norm = optional_vector("attn_q_norm.weight", config.head_dim)
        self.k_norm = optional_vector("attn_k_norm.weight", config.head_dim)
        self.o = matrix("attn_output", dim, query_size)
        self.ffn_norm = _load_vector(weights, f"{prefix}ffn_norm.weight", dim)
        self.gate, self.up = matrix("ffn_gate", ffn, dim), matrix("ffn_up", ffn, dim)
        self.down = matrix("ffn_down", dim, ffn)


class KVCache:
    """Keys and values of up to `length` tokens: for each layer float16 (2, kv_heads, length, head_dim), zeros."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        shape = (2, config.kv_heads, length, config.head_dim)
        self.layers = [Tensor.zeros(*shape, dtype=dtypes.float16).contiguous() for _ in range(config.layers)]
        Tensor.realize(*self.layers)
        self.length = length


class Transformer:
    """A model's weights, and its forward pass over tokens that continue those in `cache`."""

    def __init__(self, weights: Weights, cache: KVCache) -> None:
        """Raises ModelFileError."""
        config = self.config = weights.config
        self.cache = cache
        self.layers = [Layer(weights, i) for i in range(config.layers)]
        self.embedding = _load_matrix(weights, "token_embd.weight", config.vocab, config.dim)
        self.output_norm = _load_vector(weights, "output_norm.weight", config.dim)
        self.output = self.embedding
        if "output.weight" in weights:
            self.output = _load_matrix(weights, "output.weight", config.vocab, config.dim)
        self.cos, self.sin = (Tensor(table).realize() for table in config.rope_tables(cache.length))

    def __call__(self, tokens: Tensor, position: UOp | int) -> Tensor:
        """Runs `tokens`, int32 (n,), at `position` and the n - 1 positions after it. Stores their keys and values in
        the cache and returns the normed output of the last layer, float32 (n, dim)."""
        return self._norm(self._layers(tokens, position)[0], self.output_norm)

    def store(self, tokens: Tensor, position: UOp | int) -> Tensor:
        """Runs tokens for their keys and values only. They are stored when the returned tensor, the cache of the last
        layer, is realized."""
        return self._layers(tokens, position)[1]

    def _layers(self, tokens: Tensor, position: UOp | int) -> tuple[Tensor, Tensor]:
        x, stored = self.embedding.take(tokens), self.cache.layers[-1]
        n = tokens.shape[0]
        mask = Tensor.full((n, position + n), float("-inf")).triu(position + 1)  # causal
        for layer, kv in zip(self.layers, self.cache.layers, strict=True):
            attended, stored = self._attention(layer, self._norm(x, layer.attn_norm), kv, position, mask)
            x = x + attended
            h = self._norm(x, layer.ffn_norm)
            gated = layer.gate.product(h).silu() * layer.up.product(h)
            x = (x + layer.down.product(gated)).contiguous()
            x.realize()  # layer by layer, so that tinygrad schedules the first and reuses that for the others
        return x, stored

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (n, dim) -> (n, vocab)."""
        return self.output.product(hidden)

    def uses(self) -> BufferUses:
        """The uses of the weights and of the cache."""
        uses = BufferUses()

        def add_matrices(use: BufferUse, *matrices: QuantizedMatrix) -> None:
            uses.add(use, *(plane for matrix in matrices for plane in matrix.planes.values()))

        add_matrices(BufferUse("output head"), self.output)
        add_matrices(BufferUse("embedding", "token", self.config.vocab), self.embedding)
        uses.add(BufferUse("norm"), self.output_norm)
        uses.add(BufferUse("attention", "token", self.cache.length), self.cos, self.sin)
        uses.add(BufferUse("attention", "context", self.cache.length), *self.cache.layers)
        for layer in self.layers:
            add_matrices(BufferUse("QKV projection"), layer.q, layer.k, layer.v)
            uses.add(BufferUse("QKV projection"), layer.q_bias, layer.k_bias, layer.v_bias)
            add_matrices(BufferUse("attention output"), layer.o)
            add_matrices(BufferUse("FFN gate+up"), layer.gate, layer.up)
            add_matrices(BufferUse("FFN down"), layer.down)
            uses.add(BufferUse("norm"), layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)
        return uses

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last axis."""
        return (x * ((x * x).mean(-1, keepdim=True) + self.config.norm_eps).rsqrt() * weight).contiguous()

    def _rope(self, x: Tensor, position: UOp | int) -> Tensor:
        """Rotary position embedding of x (heads, n, head_dim): rotates element i with element i + head_dim / 2."""
        n = x.shape[1]
        cos, sin = (table[position : position + n].unsqueeze(0) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)

    def _attention(
        self, layer: Layer, x: Tensor, kv: Tensor, position: UOp | int, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The output projection of attention over x (n, dim), which is normed, and the layer's cache with the new keys
        and values stored."""
        c, n = self.config, cast(int, x.shape[0])

        def project(matrix: QuantizedMatrix, bias: Tensor | None, heads: int) -> Tensor:
            y = matrix.product(x)
            return (y if bias is None else y + bias).reshape(n, heads, c.head_dim).transpose(0, 1)

        q, k, v = (
            project(layer.q, layer.q_bias, c.heads),
            project(layer.k, layer.k_bias, c.kv_heads),
            project(layer.v, layer.v_bias, c.kv_heads),
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
