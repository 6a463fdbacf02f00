"""Writes a model of full size and random weights of a family that `make_model.py` of the test data does not know, in
the types of llama.cpp's Q4_K_M:

    python -m tools.measure family_model glm-4.7-flash OUT.gguf [--layers 4]

Sizes are those of published configurations. Rows of weights repeat after a while, each expert's from another one on.
Tokens beyond a small vocabulary are never in a text.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests import generated_model
from tests.generated_families import ARCHITECTURES
from tests.generated_parts import Parts
from tests.generated_weights import random_matrix
from tools.measure.mixed_model import more_bits, unique_rows

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """A published model: its architecture, sizes, and metadata beside those. `lone`: the kinds of its layers."""

    architecture: str
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    keys: Keys
    lone: str = ""
    rotated: int | None = None


def _experts(count: int, used: int, width: int, factor: float, **more: int | bool) -> dict[str, Any]:
    """Experts that are chosen by sigmoid scores with a bias, and a shared one. `factor`: of their results."""
    return {
        "expert_count": count,
        "expert_used_count": used,
        "expert_feed_forward_length": width,
        "expert_shared_count": 1,
        "expert_weights_scale": factor,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    } | more


_LATENT = {
    "attention.q_lora_rank": 768,
    "attention.kv_lora_rank": 512,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
}
_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 8,
    "ssm.time_step_rank": 64,
    "ssm.inner_size": 4096,
    "attention.layer_norm_epsilon": 1e-5,
}
SHAPES = {
    "glm-4.7-flash": Shape(
        "deepseek2", 47, 2048, 10240, 20, 1, 256, 154880, 64,
        _experts(64, 4, 1536, 1.8, leading_dense_block_count=1) | _LATENT, rotated=64,
    ),
    "glm-4.5-air": Shape(
        "glm4moe", 46, 4096, 10944, 96, 8, 128, 151552, 128,
        _experts(128, 8, 1408, 1.0, leading_dense_block_count=1), rotated=64,
    ),
    "ling-mini-2": Shape(
        "bailingmoe2", 20, 2048, 5120, 16, 4, 128, 157184, 256,
        _experts(256, 8, 512, 2.5, leading_dense_block_count=1)
        | {"expert_group_count": 8, "expert_group_used_count": 4}, rotated=64,
    ),
    "nemotron-3-nano": Shape(
        "nemotron_h_moe", 52, 2688, 1856, 32, 2, 128, 131072, 128,
        _experts(128, 6, 1856, 2.5, expert_shared_feed_forward_length=3712) | _MAMBA,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
}  # fmt: skip


def types_of(shape: Shape, layers: int) -> dict[str, str]:
    """The types that llama.cpp's quantizer gives matrices with Q4_K_M, by patterns of their names; where rows are not
    whole blocks, those that take their place."""
    width = int(shape.keys["expert_feed_forward_length"])
    shared = int(shape.keys.get("expert_shared_feed_forward_length", width))
    columns = {"ffn_down": shape.ffn, "ffn_down_exps": width, "ffn_down_shexp": shared, "attn_v": shape.dim}
    columns |= {"attn_qkv": shape.dim, "attn_output": shape.heads * shape.head_dim}
    columns |= {"attn_q_b": shape.keys.get("attention.q_lora_rank", 0)}
    columns |= {"ssm_out": shape.keys.get("ssm.inner_size", 0)}

    def whole(kind: str, cols: int) -> str:
        return kind if cols % 256 == 0 else {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[kind]

    better = "|".join(str(i) for i in range(layers) if more_bits(i, layers))
    types = {r".*\.ffn_gate_inp": "F32", r".*\.attn_[kv]_b": "Q8_0", "output": whole("Q6_K", shape.dim)}
    for name in ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp"):
        types[rf"blk\.({better})\.{name}"] = whole("Q6_K", columns[name])
    types |= {rf".*\.{name}": whole("Q4_K", int(cols)) for name, cols in columns.items()}
    return types | {".*": whole("Q4_K", shape.dim)}


def weights(rng: np.random.Generator, rows: int, cols: int, kind: Type) -> Any:
    """Random weights of a type, as a file holds them: rows that repeat, from any one on."""
    if kind is Type.F32:
        return random_matrix(rng, rows, cols, kind)
    twice = _twice(cols, kind.name)
    first = int(rng.integers(len(twice) // 2))
    run = twice[first:][: len(twice) // 2]
    return run[:rows] if rows <= len(run) else np.resize(run, (rows, run.shape[1]))


@functools.cache
def _twice(cols: int, kind: str) -> Any:
    return np.concatenate([unique_rows(cols, kind)] * 2)


def write(model: str, out: Path, layers: int = 0) -> None:
    """Writes a file of a model, with so many layers, if that is not 0."""
    shape = SHAPES[model]
    layers = layers or shape.layers
    parts: Parts = replace(
        ARCHITECTURES[shape.architecture], experts=shape.experts, keys=dict(shape.keys), lone=shape.lone
    )
    tokens, merges = generated_model.learned_vocabulary()
    n = shape.vocab - len(generated_model.SPECIALS)
    padded = [*tokens, *(f"[PAD{i}]" for i in range(len(tokens), n))]
    with mock.patch.dict(ARCHITECTURES, {model: replace(parts, architecture=shape.architecture)}):
        generated_model.write(
            out, architecture=model, quant="Q8_0", layers=layers, dim=shape.dim, heads=shape.heads,
            kv_heads=shape.kv_heads, head_dim=shape.head_dim, ffn=shape.ffn, context=32768, tied=False,
            rotated=shape.rotated, types=types_of(shape, layers), weights=weights, vocabulary=(padded, merges),
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="other than the model has (0: as many)")


def run(given: argparse.Namespace) -> None:
    write(given.model, given.out, given.layers)
