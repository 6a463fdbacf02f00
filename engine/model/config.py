"""A model's hyperparameters, read from its GGUF metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable

# The architectures that the forward pass covers, and the order of rows in their files' query and key matrices. True:
# the two elements that RoPE rotates together are neighbours ("norm" in llama.cpp), False: they are half a head apart
# ("neox"). Biases and norms of queries and keys are applied where a file has them.
INTERLEAVED_ROPE = {"llama": True, "qwen2": False, "qwen3": False}


def check_architecture(architecture: str, model: str) -> None:
    """Raises ModelFileError if the engine does not run this architecture; the message calls the model `model`."""
    if architecture not in INTERLEAVED_ROPE:
        raise ModelFileError(
            f"{model} is of the architecture {printable(architecture)}, which orin-chat does not run.",
            f"Choose a model of one of these: {', '.join(INTERLEAVED_ROPE)}.",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements: `dim` of the residual stream, `ffn` of the feed-forward layer. `rope_frequencies`:
    radians per position of each rotated pair, float64 (head_dim / 2,)."""

    architecture: str
    name: str
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    trained_context: int
    norm_eps: float
    interleaved_rope: bool
    rope_frequencies: NDArray[np.float64]

    @property
    def query_size(self) -> int:
        """Elements of a token's queries, over all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys, over all heads; as many as of its values."""
        return self.kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token takes in the KV cache, which is float16."""
        return self.layers * 2 * self.kv_size * 2

    def rope_tables(self, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the rotations at positions 0 to `length` - 1: float32 (length, head_dim / 2)."""
        angles = np.arange(length)[:, None] * self.rope_frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @classmethod
    def from_gguf(cls, file: GGUF) -> ModelConfig:
        """Raises ModelFileError for an architecture that the engine does not run, or a variant of one, and for
        damaged metadata."""
        name = printable(file.path.name)
        architecture = file.get("general.architecture", str)
        check_architecture(architecture, name)

        def size(key: str, default: int | None = None) -> int:
            full_key = f"{architecture}.{key}"
            value = file.get(full_key, int) if default is None else file.get(full_key, int, default)
            if not 0 < value < 1 << 31:
                raise damaged(file.path, f"{full_key} is {value}")
            return value

        if "token_embd.weight" not in file.tensors:
            raise ModelFileError(
                f"{name} has no weights (there is no token_embd.weight).",
                "It may be a vocabulary or an adapter; choose a model file.",
            )
        dim, heads = size("embedding_length"), size("attention.head_count")
        head_dim = size("attention.key_length", dim // heads)
        kv_heads = size("attention.head_count_kv", heads)
        if size("attention.value_length", head_dim) != head_dim or head_dim % 2 or heads % kv_heads:
            raise ModelFileError(
                f"{name} has attention heads of a shape that orin-chat does not run.", "Choose another model."
            )
        return cls(
            architecture=architecture,
            name=file.get("general.name", str, file.path.stem),
            layers=size("block_count"),
            dim=dim,
            ffn=size("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=file.tensors["token_embd.weight"].shape[0],
            trained_context=size("context_length"),
            norm_eps=float(file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float, 1e-5)),
            interleaved_rope=INTERLEAVED_ROPE[architecture],
            rope_frequencies=_rope_frequencies(file, architecture, head_dim),
        )


def _rope_frequencies(file: GGUF, architecture: str, head_dim: int) -> NDArray[np.float64]:
    """base**(-2i / head_dim), float64 (head_dim / 2,), scaled as the file says: `rope_freqs.weight` (Llama 3.1 and
    later) divides each frequency, as ggml_rope_ext's freq_factors; a linear scaling factor divides all of them, as
    in llama_model::load_hparams of llama.cpp. Raises ModelFileError."""
    name = printable(file.path.name)
    rotated = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    scaling = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if rotated != head_dim or scaling not in ("none", "linear"):
        variant = (
            f"RoPE scaling {printable(scaling)}" if rotated == head_dim else "heads that are partly rotated"
        )
        raise ModelFileError(f"{name} uses {variant}, which orin-chat does not run.", "Choose another model.")
    base = file.get(f"{architecture}.rope.freq_base", float, 10_000.0)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and (factors.type != 0 or factors.shape != (head_dim // 2,)):
        raise damaged(file.path, "the shape or type of rope_freqs.weight does not fit its heads")
    with np.errstate(all="ignore"):  # checked below
        frequencies = np.float64(base) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if scaling == "linear":
            frequencies /= file.get(f"{architecture}.rope.scaling.factor", float, 1.0)
        if factors is not None:
            frequencies /= factors.data.view(np.float32)
    if not (np.isfinite(frequencies).all() and (frequencies > 0).all()):
        raise damaged(file.path, "its RoPE frequencies are not positive")
    return frequencies
