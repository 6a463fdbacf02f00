"""The shape of a model, read from its GGUF metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF

# Architectures the transformer runs. Files differ in what they hold (biases, QK norms) and in the order of
# rotated pairs: llama's files interleave a head's halves (rope "norm"), the others keep them apart ("neox").
INTERLEAVED_ROPE = {"llama": True, "qwen2": False, "qwen3": False}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements. `rope_frequencies` float64 (head_dim // 2,): radians a position."""

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
    rope_frequencies: np.ndarray[tuple[int], np.dtype[np.float64]]

    @classmethod
    def from_gguf(cls, file: GGUF) -> ModelConfig:
        """Raises ModelFileError for an architecture or a variant of one that the engine does not run."""
        architecture = file.get("general.architecture", str)
        if architecture not in INTERLEAVED_ROPE:
            known = ", ".join(INTERLEAVED_ROPE)
            raise ModelFileError(
                f"{file.path.name} is of the architecture {architecture!r}, which orin-chat does not run.",
                f"Choose a model of one of these: {known}.",
            )

        def sized(key: str, default: int | None = None) -> int:
            name = f"{architecture}.{key}"
            value = file.get(name, int) if default is None else file.get(name, int, default)
            if not 0 < value < 1 << 31:
                raise ModelFileError(f"{file.path.name} gives {name} as {value}.", "The file is damaged.")
            return value

        if "token_embd.weight" not in file.tensors:
            raise ModelFileError(
                f"{file.path.name} holds no weights (there is no token_embd.weight).",
                "It may be a vocabulary or an adapter; choose a model file.",
            )
        dim, heads = sized("embedding_length"), sized("attention.head_count")
        head_dim = sized("attention.key_length", dim // heads)
        if sized("attention.value_length", head_dim) != head_dim or head_dim % 2:
            raise ModelFileError(
                f"{file.path.name} has heads of a shape that orin-chat does not run.", "Choose another model."
            )
        return cls(
            architecture=architecture,
            name=file.get("general.name", str, file.path.stem),
            layers=sized("block_count"),
            dim=dim,
            ffn=sized("feed_forward_length"),
            heads=heads,
            kv_heads=sized("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=file.tensors["token_embd.weight"].shape[0],
            trained_context=sized("context_length"),
            norm_eps=float(file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float, 1e-5)),
            interleaved_rope=INTERLEAVED_ROPE[architecture],
            rope_frequencies=_rope_frequencies(file, architecture, head_dim),
        )


def _rope_frequencies(
    file: GGUF, architecture: str, head_dim: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """base**(-2i/d), scaled as the file says: `rope_freqs.weight` divides each frequency (Llama 3.1 on;
    ggml_rope_ext's freq_factors), a linear scaling factor divides all (llama_model::load_hparams)."""
    rotated = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    scaling = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if rotated != head_dim or scaling not in ("none", "linear"):
        what = f"rope scaling {scaling!r}" if rotated == head_dim else "partly rotated heads"
        raise ModelFileError(
            f"{file.path.name} uses {what}, which orin-chat does not run yet.", "Choose another model."
        )
    base = file.get(f"{architecture}.rope.freq_base", float, 10_000.0)
    if not (math.isfinite(base) and base > 0):
        raise ModelFileError(
            f"{file.path.name} gives {base} as the base of its rotations.", "The file is damaged."
        )
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling == "linear":
        frequencies /= file.get(f"{architecture}.rope.scaling.factor", float, 1.0)
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        if factors.type != 0 or factors.shape != (head_dim // 2,):
            raise ModelFileError(
                f"{file.path.name} holds rope_freqs.weight in a shape that does not fit its heads.",
                "The file is damaged; download it again.",
            )
        frequencies /= factors.data.view(np.float32).astype(np.float64)
    return frequencies
