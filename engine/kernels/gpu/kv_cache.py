"""The layout of the KV cache on GPUs.

The cache of a layer holds, in float16, for each key head, keys as [dim / 4, token, dim % 4] and values as [token / 4,
dim, token % 4]. In decode neighbouring threads (one for each token of the keys, one for each dimension of the values)
load neighbouring 8 bytes. The same groups of four are the operands of tensor cores in prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.gpu.uops import LOG2_E

CACHE_SLACK = 1024  # tokens of a cache beyond its context, because loads run ahead and take whole tiles


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model: `query` heads share `kv` heads of keys and values, of `dim` elements each.
    `norm_eps` is set if queries and keys are RMS-normed. The cache of a layer holds up to `length` tokens."""

    query: int
    kv: int
    dim: int
    length: int
    norm_eps: float | None

    @property
    def shared_by(self) -> int:
        """Query heads that share a key head."""
        return self.query // self.kv

    @property
    def cache_size(self) -> int:
        """Elements of the keys of a layer; its values have as many."""
        return self.kv * self.length * self.dim

    @property
    def query_scale(self) -> float:
        """The factor of queries: 1 / sqrt(dim), and log2(e) because the softmax uses exp2."""
        return float(self.dim**-0.5 * LOG2_E)

    def key_index(self, head: UOp, token: UOp, d: UOp | int) -> UOp:
        """The index of element d of a token's key."""
        return ((head * (self.dim // 4) + d // 4) * self.length + token) * 4 + d % 4

    def value_index(self, head: UOp, token: UOp, d: UOp) -> UOp:
        """The index of element d of a token's value."""
        return ((head * (self.length // 4) + token // 4) * self.dim + d) * 4 + token % 4
