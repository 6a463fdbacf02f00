"""The KV cache of tensor graphs."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from engine.model.config import ModelConfig


class KVCache:
    """Keys and values of up to `length` tokens: for each layer float16 (2, kv_heads, length, head_dim), zeros."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        shape = (2, config.kv_heads, length, config.head_dim)
        self.layers = [Tensor.zeros(*shape, dtype=dtypes.float16).contiguous() for _ in range(config.layers)]
        Tensor.realize(*self.layers)
        self.length = length
