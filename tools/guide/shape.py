"""The size of orin-guide."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A llama transformer with tied embeddings. `dim` and `ffn` are multiples of 256, as the K quantizations need;
    `context` is in tokens."""

    layers: int = 4
    dim: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1024
    vocab: int = 3072
    context: int = 2048
    rope_base: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def weights(self) -> int:
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        return self.vocab * self.dim + self.layers * layer + self.dim

    def figures(self) -> dict[str, str]:
        """The figures that the guide names in answers about itself."""
        return {
            "weights": f"{self.weights / 1e6:.0f}",
            "layers": str(self.layers),
            "vocab": str(self.vocab),
            "context": str(self.context),
            "file_mb": f"{self.weights * 34 / 32 / 1e6:.0f}",
        }


SHAPE = Shape()
