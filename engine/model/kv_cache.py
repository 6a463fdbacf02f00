"""The KV cache: keys and values of the tokens seen so far, on the device."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from engine.model.config import ModelConfig


class KVCache:
    """float16 keys and values of up to `length` tokens: (2, kv_heads, length, head_dim) a layer."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        shape = (2, config.kv_heads, length, config.head_dim)
        self.layers = [Tensor.zeros(*shape, dtype=dtypes.float16).contiguous() for _ in range(config.layers)]
        Tensor.realize(*self.layers)
        self.length = length

    @staticmethod
    def bytes_per_token(config: ModelConfig) -> int:
        return 2 * config.layers * config.kv_heads * config.head_dim * 2
