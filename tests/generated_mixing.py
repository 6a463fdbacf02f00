"""The tensors of RWKV 7's sublayers, for `generated_tensors`."""

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


def add_channel_mix(to: Tensors, prefix: str, width: int) -> None:
    dim = to.shape.dim
    to.norm(f"{prefix}attn_norm_2")
    to.matrix(f"{prefix}channel_mix_key", width, dim)
    to.matrix(f"{prefix}channel_mix_value", dim, width)
    to.numbers(f"{prefix}channel_mix_lerp_k.weight", to.rng.random(dim))
