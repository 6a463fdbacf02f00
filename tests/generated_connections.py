"""The tensors of hyper-connections, hashes of tokens and indexers, for `generated_tensors`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf import GGMLQuantizationType as Type

if TYPE_CHECKING:
    from tests.generated_tensors import Tensors


def add_last_connection(to: Tensors) -> None:
    """What the head reads, and the table of the hashes."""
    _add_mixing(to, "output_hc")
    keys = to.metadata
    ends = zip(keys["ple.head_offsets"], keys["ple.head_vocab_sizes"], strict=True)
    to.matrix("per_layer_token_embd", max(map(sum, ends)) + 1, keys["embedding_length_per_layer_input"])


def add_connections(to: Tensors, layer: int, prefix: str) -> None:
    """Those of a layer, and what else is in it besides its sublayers."""
    count, dim, keys = to.metadata["hyper_connection.count"], to.shape.dim, to.metadata
    width = count * dim
    for name in "attn", "ffn":
        _add_mixing(to, f"{prefix}hc_{name}")
        to.matrix(f"{prefix}hc_{name}_inject", count, width, "F32")
    if layer in keys["ple.layers"]:
        to.matrix(f"{prefix}ple_key", width, dim)
        to.matrix(f"{prefix}ple_value", dim, dim)
        for name in "key", "query", "conv":
            to.vector(f"{prefix}ple_norm_{name}.weight", width, 1.0)
        taps = to.weights(to.rng, width, keys["ple.conv_kernel"], Type.F32)
        to.numbers(f"{prefix}ple_conv1d.weight", taps)


def add_indexer(to: Tensors, layer: int, prefix: str) -> None:
    """What chooses the tokens that the attention of a layer reads, if anything does."""
    keys, dim = to.metadata, to.shape.dim
    if "attention.indexer.head_count" not in keys:
        return
    heads, size = (keys[f"attention.indexer.{x}"] for x in ("head_count", "key_length"))
    if to.parts.latent:
        to.matrix(f"{prefix}indexer.attn_q_b", heads * size, keys["attention.q_lora_rank"])
        to.matrix(f"{prefix}indexer.attn_k", size, dim)
        to.matrix(f"{prefix}indexer.proj", heads, dim)
        to.vector(f"{prefix}indexer.k_norm.weight", size, 1.0)
        to.vector(f"{prefix}indexer.k_norm.bias", size, 0.0)
    elif layer >= keys.get("leading_dense_block_count", 0):
        to.matrix(f"{prefix}indexer.q_proj", heads * size, dim)
        to.matrix(f"{prefix}indexer.k_proj", size, dim)
        for name in "qk":
            to.vector(f"{prefix}indexer.{name}_norm.weight", size, 1.0)


def _add_mixing(to: Tensors, name: str) -> None:
    count, rank = (to.metadata[f"hyper_connection.{x}"] for x in ("count", "low_rank"))
    width = count * to.shape.dim
    to.vector(f"{name}_norm.weight", width, 1.0)
    to.matrix(f"{name}_down", rank, width)
    to.matrix(f"{name}_up", width, rank)
