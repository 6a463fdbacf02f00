"""Latent attention, read from a file: `LatentAttention`.

Source of names and formulas: src/models/deepseek2.cpp of llama.cpp, and for yarn also src/llama-context.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.description.attention import LatentAttention
from engine.description.head_reader import MAX_HEAD, AttentionHeads, HeadReader
from engine.description.spec import Rope
from engine.description.sublayers import Weight
from engine.errors import ModelFileError
from engine.formats.quantization import read_as
from engine.formats.rope_order import HeadOrder

_F32, _F16 = 0, 1  # ggml's types


def is_latent(file: HeadReader, prefix: str) -> bool:
    """Whether the attention of a layer is latent."""
    return file.has(f"{prefix}attn_kv_a_mqa.weight")


def read_latent_attention(file: HeadReader, i: int, prefix: str) -> LatentAttention:
    """The attention of layer i. Newer files have the matrices of keys and of values as they are used; older ones have
    those of a head as one, of whose transpose that of keys is a part. Raises ModelFileError."""
    dim, heads, latent = (
        file.dim,
        file.size_of_layer("attention.head_count", i),
        file.size("attention.kv_lora_rank"),
    )
    rotated = file.size("rope.dimension_count")
    whole = file.size("attention.key_length_mla", file.size("attention.key_length", dim // heads))
    values = file.size("attention.value_length_mla", file.size("attention.value_length", whole))
    plain, head_dim = whole - rotated, latent + rotated
    if plain < 1 or max(head_dim, whole, values) > MAX_HEAD or heads > MAX_HEAD or latent % 2 or rotated % 2:
        raise ModelFileError(
            f"{file.name} has latent attention of a shape that orin-chat does not run.",
            "Choose another model.",
        )
    order = HeadOrder(rotated, rotated, file.family.interleaved and not any(file.sections()))
    turned = None if order.is_engines else order
    q, q_down, q_down_norm, width = "attn_q", None, None, dim
    if file.has(f"{prefix}attn_q_a.weight"):
        width = file.size("attention.q_lora_rank")
        q, q_down = "attn_q_b", file.weight(f"{prefix}attn_q_a", width, dim)
        q_down_norm = file.required(f"{prefix}attn_q_a_norm.weight", width)

    def queries(first: int, run: int, order: HeadOrder | None) -> Weight:
        rows, of = heads * run, heads * whole
        return file.weight(f"{prefix}{q}", rows, width, first, of, order, every=whole, run=run)

    def keys(first: int, rows: int, order: HeadOrder | None) -> Weight:
        return file.weight(f"{prefix}attn_kv_a_mqa", rows, dim, first, head_dim, order)

    if file.has(f"{prefix}attn_kv_b.weight"):
        of_keys, of_values = _of_both(file, f"{prefix}attn_kv_b.weight", heads, plain, values, latent)
    else:
        of_keys = file.weight(f"{prefix}attn_k_b", latent, plain, experts=heads)
        of_values = file.weight(f"{prefix}attn_v_b", values, latent, experts=heads)
    is_rotated = file.family.unrotated_every != 1
    rope = Rope(head_dim // 2)
    if is_rotated:
        rope = file.rotation(AttentionHeads(heads, 1, head_dim, rotated, None), plain=False)
    magnitude, growth = _yarn(file)
    gate = file.weight(f"{prefix}attn_gate", heads, dim) if file.has(f"{prefix}attn_gate.weight") else None
    return LatentAttention(
        q=queries(0, plain, None), k=keys(0, latent, None), v=None,
        o=file.weight(f"{prefix}attn_output", dim, heads * values),
        q_bias=None, k_bias=None, v_bias=None, o_bias=file.vector(f"{prefix}attn_output.bias", dim),
        q_norm=None, k_norm=None, heads=heads, kv_heads=1, head_dim=head_dim,
        rope=file.add_rope(replace(rope, magnitude=magnitude)), scale=(magnitude * growth) ** 2 * whole**-0.5,
        q_rotated=queries(plain, rotated, turned), k_rotated=keys(latent, rotated, turned),
        of_keys=of_keys, of_values=of_values,
        latent_norm=file.required(f"{prefix}attn_kv_a_norm.weight", latent),
        q_down=q_down, q_down_norm=q_down_norm, gate=gate,
    )  # fmt: skip


def _of_both(
    file: HeadReader, tensor: str, heads: int, plain: int, values: int, latent: int
) -> tuple[Weight, Weight]:
    """The matrices of keys and of values in a tensor that has, of each head, rows of both. Blocks of a quantized type
    lie along rows, so those of the transpose are floats: they are few of a model's weights."""
    every = plain + values
    type = file.check(tensor, (heads * every, latent))
    floats = _F32 if type == _F32 else _F16
    of_keys = Weight(tensor, latent, plain, floats, 0, None, heads, every, transposed=True)
    return of_keys, Weight(tensor, values, latent, read_as(type), plain, None, heads, every, values)


def _yarn(file: HeadReader) -> tuple[float, float]:
    """What rotated elements are multiplied by, and what queries and keys are beside, both with yarn."""
    magnitude = file.number("rope.scaling.attn_factor", 1.0)
    scale = file.number("rope.scaling.factor", 1.0)
    if file.file.get(file.key("rope.scaling.type"), str, "none") != "yarn" or scale <= 1:
        return magnitude, 1.0
    # a tenth of the model's own number: TAG_DEEPSEEK2_YARN_LOG_MUL_FIX
    multiplier = file.number("rope.scaling.yarn_log_multiplier", 0.0)
    grown = 1 + 0.1 * math.log(scale)
    return magnitude * (1.0 if multiplier else grown), 1 + multiplier * math.log(scale)
