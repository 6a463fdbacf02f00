"""The KV cache: keys and values of the tokens seen so far, on the device, and which tokens those are."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor, dtypes

from engine.model.config import ModelConfig


class KVCache:
    """float16 keys and values of up to `length` tokens: one tensor (2, kv_heads, length, head_dim) a layer.

    `tokens` are those whose entries are valid; a prompt that begins with them need not be computed again.
    """

    def __init__(self, config: ModelConfig, length: int) -> None:
        shape = (2, config.kv_heads, length, config.head_dim)
        self.layers = [Tensor.zeros(*shape, dtype=dtypes.float16).contiguous() for _ in range(config.layers)]
        Tensor.realize(*self.layers)
        self.length = length
        self.tokens: list[int] = []

    @staticmethod
    def bytes_per_token(config: ModelConfig) -> int:
        return 2 * config.layers * config.kv_heads * config.head_dim * 2

    def reuse(self, prompt: Sequence[int]) -> int:
        """Keeps the longest common prefix of `prompt` and the cached tokens, and returns its length: less than
        the whole prompt, since the last token's output is always needed."""
        common = 0
        for cached, wanted in zip(self.tokens, prompt[:-1], strict=False):
            if cached != wanted:
                break
            common += 1
        del self.tokens[common:]
        return common
