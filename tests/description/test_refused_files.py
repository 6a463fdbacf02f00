"""Descriptions that are refused."""

import numpy as np
import pytest

from engine.errors import ModelFileError
from tests.description.test_architectures import DIM, LAYERS, path_of, read

__all__ = ["path_of"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "arctic"}, "of the architecture arctic, which orin-chat does not run"),
        ({"general__architecture": "flux"}, "of the architecture flux, which makes pictures or videos"),
        ({"adapter__type": "lora"}, "is a LoRA adapter, not a language model"),
        ({"llama__block_count": 0}, "is damaged: llama.block_count is 0"),
        ({"llama__block_count": LAYERS + 1}, "has no blk.3.attn_norm.weight"),
        ({"llama__block_count": LAYERS - 1}, "holds blk.2.attn_k.weight, which orin-chat does not know"),
        ({"llama__embedding_length": 1 << 31}, "is damaged: llama.embedding_length is 2147483648"),
        ({"llama__embedding_length": 2 * DIM}, "has token_embd.weight with the shape"),
        ({"llama__feed_forward_length": 97}, "has blk.0.ffn_down.weight with the shape"),
        ({"llama__attention__key_length": 15, "llama__attention__value_length": 15}, "heads of a shape"),
        ({"llama__attention__value_length": 32}, "heads of a shape"),
        ({"llama__attention__head_count_kv": 3}, "heads of a shape"),
        ({"llama__attention__head_count_kv": 4}, "has blk.0.attn_k.weight with the shape"),
        ({"llama__rope__dimension_count": 7}, "heads of a shape"),
        (
            {
                f"llama__{key}": (1 << 31) - 2
                for key in ("attention__key_length", "attention__value_length", "rope__dimension_count")
            },
            "heads of a shape",
        ),
        ({"llama__rope__dimension_count": 32}, "heads of a shape"),
        ({"llama__rope__scaling__type": "ntk"}, "RoPE scaling ntk"),
        ({"llama__rope__freq_base": -1.0}, "RoPE frequencies"),
        ({"llama__rope__freq_base": float("inf")}, "llama.rope.freq_base is inf"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": -1.0}, "RoPE frequencies"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": -1.0}, "RoPE frequencies"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__freq_base": 1.0}, "yarn has no bounds"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_beta_fast": 0.0},
            "yarn has no bounds",
        ),
        ({"llama__attention__scale": 0.0}, "llama.attention.scale is 0"),
        ({"llama__logit_scale": 1e-45}, "llama.logit_scale is 1e-45"),
        ({"llama__residual_scale": 1e-200}, "llama.residual_scale is 1e-200"),
        ({"llama__embedding_scale": 0.0}, "llama.embedding_scale is 0"),
        ({"llama__residual_scale": 1e38, "llama__embedding_scale": 1e-38}, "nothing can be computed with"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_metadata_that_cannot_be_are_refused(path_of, metadata, message):
    refuse(path_of("llama"), message, **metadata)


@pytest.mark.parametrize(
    ("architecture", "tensors", "message"),
    [
        ("llama", {"blk.0.attn_q.weight": None}, "has no blk.0.attn_q.weight"),
        ("llama", {"blk.1.ffn_norm.weight": None}, "has no blk.1.ffn_norm.weight"),
        ("llama", {"output_norm.weight": None}, "has no output_norm.weight"),
        ("llama", {"output.weight": (5, DIM)}, "has output.weight with the shape"),
        ("llama", {"blk.1.ssm_a": (DIM,)}, "holds blk.1.ssm_a, which orin-chat does not know"),
        ("llama", {"rope_freqs.weight": (7,)}, "rope_freqs.weight does not fit its heads"),
        ("qwen2", {"blk.0.attn_q.bias": (DIM + 1,)}, "has blk.0.attn_q.bias with the shape"),
        ("qwen3", {"blk.0.attn_q_norm.weight": (8,)}, "has blk.0.attn_q_norm.weight with the shape"),
        ("phi3", {"blk.0.attn_qkv.weight": (DIM, DIM)}, "has blk.0.attn_qkv.weight with the shape"),
        ("phi3", {"blk.0.ffn_up.weight": (96, DIM)}, "has blk.0.ffn_up.weight with the shape"),
        ("phi3", {"rope_factors_long.weight": (4,)}, "rope_factors_long.weight does not fit its heads"),
        ("olmo2", {"blk.0.attn_k_norm.weight": (DIM,)}, "has blk.0.attn_k_norm.weight with the shape"),
        (
            "hunyuan-dense",
            {"blk.0.attn_q_norm.weight": (4, 16)},
            "has blk.0.attn_q_norm.weight with the shape",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(path_of, architecture, tensors, message):
    refuse(path_of(architecture), message, tensors)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (np.array([True, False]), "its pattern of windows has 2 layers"),
        (0, "sliding_window_pattern is 0"),
        ("all", "sliding_window_pattern"),
    ],
)
def test_a_damaged_pattern_of_windows_is_refused(path_of, pattern, message):
    refuse(path_of("gemma3"), message, gemma3__attention__sliding_window_pattern=pattern)


def refuse(path, message, tensors=None, **metadata):
    with pytest.raises(ModelFileError, match=message) as error:
        read(path, tensors, **metadata)
    assert str(error.value).startswith("model.gguf ") and error.value.hint


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__type": "adapter", "llama__embedding_length": None}, "is a LoRA adapter, not a language"),
        ({"general__type": "imatrix", "general__architecture": None}, "is an importance matrix"),
        ({"general__architecture": "clip"}, "is an encoder of pictures .mmproj., not"),
        ({"general__architecture": "controlvector"}, "is a control vector"),
    ],
)
def test_what_else_gguf_files_hold_is_named(path_of, metadata, message):
    refuse(path_of("llama"), message, **metadata)


def test_a_vocabulary_is_no_model(path_of):
    refuse(path_of("llama"), "has no weights", {"token_embd.weight": None})


@pytest.mark.parametrize(
    "key, value", [("rope.dimension_count", 48), ("kv_lora_rank", 1 << 20), ("rope.dimension_count", 15)]
)
def test_latent_attention_of_no_known_shape_is_refused(path_of, key, value):
    name = key.replace(".", "__") if "." in key else f"attention__{key}"
    refuse(path_of("deepseek2"), "has latent attention of a shape", **{f"deepseek2__{name}": value})


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"expert_gating_func": 4}, "scores its experts by function 4"),
        ({"expert_group_count": 3}, "2 of 3 groups of 8 experts"),
        ({"expert_group_count": 8}, "2 of 8 groups of 8 experts"),
        ({"expert_group_used_count": 5}, "5 of 4 groups"),
        ({"expert_group_used_count": 1}, "1 of 4 groups"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(path_of, metadata, message):
    with pytest.raises(ModelFileError, match=message):
        read(path_of("bailingmoe2"), **{f"bailingmoe2__{key}": value for key, value in metadata.items()})
