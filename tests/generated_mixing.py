"""The tensors of RWKV's sublayers, for `generated_tensors`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.generated_tensors import Tensors

LOW_RANKS = {"w": "decay", "a": "iclr", "v": "value_residual_mix", "g": "gate"}


def add_time_mix(to: Tensors, layer: int, prefix: str) -> None:
    dim, prefix = to.shape.dim, f"{prefix}time_mix_"
    has_gate = to.parts.layer_norms == "biases"  # ARWKV has none, and no norm
    for name in "receptance", "key", "value", "output":
        to.matrix(prefix + name, dim, dim)
    for name, key in LOW_RANKS.items():
        if name == "g" and not has_gate:
            continue
        rank = to.metadata[f"attention.{'iclr' if name == 'v' and not layer else key}_lora_rank"]
        to.matrix(f"{prefix}{name}1", rank, dim, "F32")
        to.matrix(f"{prefix}{name}2", dim, rank, "F32")
        if name != "g":
            to.vector(f"{prefix}{name}0.weight", dim, 0.0, 1.0)
    to.numbers(f"{prefix}lerp_fused.weight", to.rng.random((6 if has_gate else 5, 1, 1, dim)))
    for name, mean in {"k_k": 1.0, "k_a": 1.0, "r_k": 0.0}.items():
        to.vector(f"{prefix}{name}.weight", dim, mean, 0.5)
    if has_gate:
        to.vector(f"{prefix}ln.weight", dim, 1.0)
        to.vector(f"{prefix}ln.bias", dim, 0.0)


def add_older_time_mix(to: Tensors, prefix: str) -> None:
    """RWKV 6's, which has LayerNorms, or that of Qwen 2's layers."""
    dim, prefix, is_own = to.shape.dim, f"{prefix}time_mix_", to.parts.layer_norms == "biases"
    rank, low, size = (
        to.metadata[key] for key in ("time_mix_extra_dim", "time_decay_extra_dim", "wkv.head_size")
    )
    keys = dim if is_own else to.metadata["attention.head_count_kv"] * size
    for name, rows in ("receptance", dim), ("key", keys), ("value", keys), ("gate", dim), ("output", dim):
        to.matrix(prefix + name, rows, dim)
        if not is_own and name in ("receptance", "key", "value"):
            to.vector(f"{prefix}{name}.bias", rows, 0.0)
    to.matrix(f"{prefix}w1", 5 * rank, dim, "F32")
    to.numbers(f"{prefix}w2.weight", 0.5 * to.rng.standard_normal((5, dim, rank)))
    to.matrix(f"{prefix}decay_w1", low, dim, "F32")
    to.matrix(f"{prefix}decay_w2", dim, low, "F32")
    to.numbers(f"{prefix}lerp_x.weight", to.rng.random(dim))
    to.numbers(f"{prefix}lerp_fused.weight", to.rng.random((5, 1, 1, dim)))
    to.vector(f"{prefix}decay.weight", dim, -2.0, 1.0)
    if is_own:
        to.numbers(f"{prefix}first.weight", to.rng.standard_normal((dim // size, size)))
        to.vector(f"{prefix}ln.weight", dim, 1.0)
        to.vector(f"{prefix}ln.bias", dim, 0.0)


def add_channel_mix(to: Tensors, prefix: str, width: int) -> None:
    dim = to.shape.dim
    to.norm(f"{prefix}attn_norm_2")
    to.matrix(f"{prefix}channel_mix_key", width, dim)
    to.matrix(f"{prefix}channel_mix_value", dim, width)
    to.numbers(f"{prefix}channel_mix_lerp_k.weight", to.rng.random(dim))
    if to.parts.older:
        to.matrix(f"{prefix}channel_mix_receptance", dim, dim)
        to.numbers(f"{prefix}channel_mix_lerp_r.weight", to.rng.random(dim))
