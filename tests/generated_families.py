"""What the files of each architecture have beyond llama's, for `generated_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EPSILON = 1e-5


@dataclass(frozen=True)
class Parts:
    """What an architecture's files have beyond llama's. `architecture`: its name, if files of it differ. `norms`: those
    of queries and keys, over a "head", over "all", or LayerNorms of "heads" with weights of their own. `biases`: of
    "qkv", or of all matrices of a layer. `renamed`: ffn_norm is called post_attention_norm. `delta`: gated delta nets
    in the layers without attention, which has a gate; `fused_delta`: their beta and alpha are one matrix. `conv`,
    `mamba`, `scan` or `keyed`: every other layer is a short convolution, a Mamba 2 layer, a Mamba layer or a delta net
    with decays of keys. `shared`: a shared expert, `ungated`: without a gate. `every_expert`: of so many layers, the
    last has experts. `choice_bias`: of the choice of experts. `layer_norms`: with "biases" or without ("plain").
    `feed_forward`: "ungated", or with "gated biases", and "beside" attention, without a norm of its own. `lone`: a
    layer is a Mamba 2 layer, a feed-forward layer or attention, by these letters in turns. `mamba_beside`: attention
    has a Mamba 2 layer beside it. `latent`: latent attention, with the matrices of keys and values "apart" or
    "together". `layers`: those after the second have no keys and values of their own, and a token gives each layer 32
    numbers. `streams`: besides, there are four streams (AltUp), and a matrix of a low rank beside attention. `beside`:
    experts are beside a feed-forward layer, and full attention has keys as values. `scaled`: layers have a scale, and
    attention has none. `positions`: these are added to the embeddings. `first_norm`: one of the embeddings, in place of
    the first layer's, `embedding_norm`: one beside that. `partial`: layers have attention and a feed-forward layer (L),
    or one of these (A, F), in turns. `halved`: feed-forward layers are half as wide as the metadata say. `sub_norms`:
    before the last product of a sublayer. `gated`: attention has a gate, of "elements" or of "heads". `normed_after`:
    norms come after the sums, as those of BERT, also one after the embeddings, to which the type of a token is added.
    `keys`: metadata, without the architecture; they are such that every part counts within 100 tokens."""

    architecture: str = ""
    biases: str = ""
    norms: str = ""
    norms_before: bool = True
    norms_after: bool = False
    fused: bool = False
    experts: int = 0
    sinks: bool = False
    renamed: bool = False
    delta: bool = False
    keyed: bool = False
    fused_delta: bool = False
    conv: bool = False
    mamba: bool = False
    scan: bool = False
    layer_norms: str = ""
    feed_forward: str = ""
    lone: str = ""
    mamba_beside: bool = False
    shared: bool = False
    ungated: bool = False
    choice_bias: bool = False
    every_expert: int = 1
    latent: str = ""
    thinks: bool = False
    layers: bool = False
    streams: bool = False
    beside: bool = False
    scaled: bool = False
    positions: bool = False
    normed_after: bool = False
    first_norm: str = ""
    embedding_norm: bool = False
    partial: str = ""
    halved: bool = False
    gated: str = ""
    sub_norms: bool = False
    keys: Mapping[str, int | float | str | Sequence[int]] = field(default_factory=dict)


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 48,
    "rope.scaling.yarn_beta_fast": 1.5,
}
WINDOW = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": 3,
    "rope.freq_base_swa": 500.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}
GEMMA4 = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [True, False] * 4,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count_swa": 32,
    "rope.freq_base_swa": 500.0,
    "final_logit_softcapping": 10.0,
}
BOTH_WAYS = {"attention.causal": False, "pooling_type": 1}
MULTIPLIERS = {"attention.scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "full_attention_interval": 2,
}
LATENT = {
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": 16,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
}
MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
SCAN = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 128}
ARCHITECTURES: dict[str, Parts] = {
    "mamba": Parts(scan=True, lone="M", keys=SCAN | {"ssm.dt_b_c_rms": True, "attention.head_count_kv": 0}),
    "mamba2": Parts(mamba=True, lone="M", keys=MAMBA | {"attention.head_count_kv": 0}),
    "jamba": Parts(
        scan=True, experts=4, every_expert=2, keys=SCAN | {"expert_count": 4, "expert_used_count": 2}
    ),
    "llama": Parts(),
    "bitnet": Parts(sub_norms=True),
    "bitnet-b1.58": Parts(sub_norms=True),
    "llama4": Parts(
        experts=4,
        shared=True,
        ungated="elements",
        every_expert=2,
        keys={"attention.sliding_window": 24, "attention.temperature_length": 32}
        | {"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 64}
        | {"interleave_moe_layer_step": 2, "expert_weights_scale": 1.0},
    ),
    "qwen2": Parts(biases="qkv"),
    "qwen3": Parts(norms="head", thinks=True),
    "mistral3": Parts(
        keys=YARN | {"rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.3}
    ),
    "phi3": Parts(  # with the factors of contexts of more than 64 tokens and of the others
        fused=True, keys={"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2}
    ),
    "gemma3": Parts(norms="head", norms_after=True, keys=WINDOW),
    "gemma4": Parts(
        norms="head",
        norms_after=True,
        layers=True,
        scaled=True,
        keys=GEMMA4 | {"embedding_length_per_layer_input": 32},
    ),
    "gemma4-moe": Parts(
        architecture="gemma4",
        norms="head",
        norms_after=True,
        experts=8,
        beside=True,
        scaled=True,
        keys=GEMMA4 | EXPERTS | {"attention.head_count_kv": [2, 1] * 4},
    ),
    "gemma3n": Parts(
        norms="head",
        norms_after=True,
        layers=True,
        streams=True,
        keys={key: value for key, value in GEMMA4.items() if not key.endswith(("length_swa", "count_swa"))}
        | {
            "embedding_length_per_layer_input": 32,
            "activation_sparsity_scale": [1.2, 0.3] + [float("-inf")] * 62,
        },
    ),
    "granite": Parts(keys=MULTIPLIERS),
    "granitemoe": Parts(experts=8, keys=MULTIPLIERS | {"expert_count": 8, "expert_used_count": 2}),
    "minicpm": Parts(keys={"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}),
    "gemma": Parts(),
    "gemma2": Parts(
        norms_after=True,
        keys={
            "attention.sliding_window": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 10.0,
        },
    ),
    "command-r": Parts(layer_norms="plain", feed_forward="gated beside", keys={"logit_scale": 0.25}),
    "cohere2": Parts(
        layer_norms="plain",
        feed_forward="gated beside",
        keys={"logit_scale": 0.25, "attention.sliding_window": 24},
    ),
    "cohere2moe": Parts(
        layer_norms="plain",
        feed_forward="gated beside",
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True}
        | {"logit_scale": 0.25, "attention.sliding_window": 24},
    ),
    "command-r-plus": Parts(
        architecture="command-r",
        norms="heads",
        layer_norms="plain",
        feed_forward="gated beside",
        keys={"logit_scale": 0.25},
    ),
    "stablelm-12b": Parts(
        architecture="stablelm", norms="heads", layer_norms="biases", feed_forward="gated beside"
    ),
    "baichuan": Parts(keys={"attention.max_alibi_bias": 8.0}),
    "refact": Parts(),
    "apertus": Parts(
        norms="head",
        feed_forward="ungated",
        keys={"xielu.alpha_n": [0.5, 0.8] * 8, "xielu.alpha_p": [0.7, 1.1] * 8}
        | {"xielu.beta": [0.5, 0.4] * 8, "xielu.eps": [-1e-6] * 16},
    ),
    "codeshell": Parts(layer_norms="biases", biases="all", fused=True, feed_forward="ungated"),
    "deci": Parts(partial="LFA"),
    "olmo": Parts(layer_norms="none", keys={"attention.clamp_kqv": 1.0}),
    "qwen": Parts(biases="qkv", fused=True, halved=True),
    "granite_swa": Parts(
        sinks=True,
        keys=MULTIPLIERS
        | {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False] * 32}
        | {"attention.rope_pattern": [1, 1, 0, 1] * 16},
    ),
    "mellum": Parts(norms="head", experts=8, keys=EXPERTS | {"attention.sliding_window": 24}),
    "phimoe": Parts(
        layer_norms="biases",
        biases="qkvo",
        experts=8,
        keys=EXPERTS | {"feed_forward_length": 64, "attention.layer_norm_rms_epsilon": EPSILON},
    ),
    "afmoe": Parts(
        norms="head",
        norms_after=True,
        gated="elements",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "attention.sliding_window": 24},
    ),
    "jais": Parts(
        layer_norms="biases",
        biases="all",
        fused=True,
        feed_forward="gated biases",
        keys={"attention.max_alibi_bias": 8.0},
    ),
    "jais2": Parts(layer_norms="biases", biases="all", feed_forward="ungated"),
    "muse-glimmer": Parts(
        norms="head",
        norms_after=True,
        gated="elements",
        keys={"logit_scale": 0.25, "final_logit_softcapping": 10.0, "attention.sliding_window": 24}
        | {"rope.freq_base_swa": 500.0},
    ),
    "laguna": Parts(
        norms="head",
        gated="heads",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "attention.sliding_window": 24}
        | {"rope.freq_base_swa": 500.0, "rope.dimension_count_swa": 16}
        | {key: value for key, value in YARN.items() if "beta" not in key},
    ),
    "spark2_5": Parts(
        gated="heads",
        keys={"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False] * 32}
        | {"rope.freq_base_swa": 500.0},
    ),
    "mpt": Parts(
        layer_norms="plain",
        fused=True,
        feed_forward="ungated",
        keys={"attention.clamp_kqv": 1.0, "attention.max_alibi_bias": 8.0},
    ),
    "bloom": Parts(
        layer_norms="biases", biases="all", fused=True, feed_forward="ungated", embedding_norm=True
    ),
    "jina-bert-v2": Parts(layer_norms="biases", biases="all", normed_after=True, keys=BOTH_WAYS),
    "stablelm": Parts(layer_norms="biases", biases="qkv"),
    "starcoder2": Parts(layer_norms="biases", biases="all", feed_forward="ungated"),
    "phi2": Parts(layer_norms="biases", biases="all", fused=True, feed_forward="ungated beside"),
    "gptneox": Parts(
        layer_norms="biases",
        biases="all",
        fused=True,
        feed_forward="ungated",
        keys={"use_parallel_residual": True},
    ),
    "eurobert": Parts(keys=BOTH_WAYS),
    "llama-embed": Parts(keys=BOTH_WAYS),
    "modern-bert": Parts(
        layer_norms="plain",
        fused=True,
        first_norm="token_embd_norm",
        keys=BOTH_WAYS | {"attention.sliding_window": 32, "rope.freq_base_swa": 500.0},
    ),
    "arcee": Parts(feed_forward="ungated"),
    "maincoder": Parts(norms="head"),
    "pangu-embedded": Parts(biases="all"),
    "xverse": Parts(),
    "gpt2": Parts(layer_norms="biases", biases="all", fused=True, feed_forward="ungated", positions=True),
    "starcoder": Parts(
        layer_norms="biases", biases="all", fused=True, feed_forward="ungated", positions=True
    ),
    "neo-bert": Parts(fused=True, keys=BOTH_WAYS),
    "bert": Parts(
        layer_norms="biases",
        biases="all",
        feed_forward="ungated",
        positions=True,
        normed_after=True,
        keys=BOTH_WAYS,
    ),
    "nomic-bert": Parts(layer_norms="biases", fused=True, normed_after=True, keys=BOTH_WAYS),
    "nomic-bert-moe": Parts(
        layer_norms="biases",
        biases="all",
        fused=True,
        feed_forward="ungated",
        normed_after=True,
        experts=4,
        keys=BOTH_WAYS | {"expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2},
    ),
    "gemma-embedding": Parts(
        norms="head",
        norms_after=True,
        keys=BOTH_WAYS | WINDOW | {"attention.sliding_window": 32},
    ),
    "falcon": Parts(layer_norms="biases", fused=True, feed_forward="ungated beside"),
    "nemotron": Parts(layer_norms="biases", feed_forward="ungated"),
    "orion": Parts(layer_norms="biases"),
    "falcon-h1": Parts(mamba=True, mamba_beside=True, keys=MAMBA),
    "nemotron_h": Parts(
        mamba=True, lone="ME*", feed_forward="ungated", keys=MAMBA | {"attention.layer_norm_epsilon": EPSILON}
    ),
    "nemotron_h_moe": Parts(
        mamba=True,
        lone="ME*",
        feed_forward="ungated",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=MAMBA
        | EXPERTS
        | {"attention.layer_norm_epsilon": EPSILON}
        | {"expert_shared_feed_forward_length": 96, "expert_shared_count": 1}
        | {"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_gating_func": 2},
    ),
    "granitehybrid": Parts(
        mamba=True,
        experts=8,
        shared=True,
        ungated="elements",
        keys=MAMBA
        | MULTIPLIERS
        | {"rope.scaling.finetuned": False}
        | {"expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 96},
    ),
    "lfm2": Parts(norms="head", conv=True, keys={"shortconv.l_cache": 3}),
    "lfm2moe": Parts(
        norms="head",
        conv=True,
        experts=8,
        choice_bias=True,
        keys=EXPERTS | {"shortconv.l_cache": 3, "leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "hunyuan-dense": Parts(norms="head"),
    "hunyuan_vl": Parts(
        norms="head", keys={"rope.dimension_sections": [2, 2, 2, 2], "rope.scaling.alpha": 1.5}
    ),
    "smallthinker": Parts(
        experts=8, keys=EXPERTS | {"attention.sliding_window": 4096, "expert_gating_func": 2}
    ),
    "hunyuan-moe": Parts(
        norms="head",
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS | {"feed_forward_length": 64, "expert_shared_feed_forward_length": 96},
    ),
    "glm4": Parts(fused=True, norms_after=True),
    "chatglm": Parts(fused=True, biases="qkv"),
    "ernie4_5": Parts(),
    "internlm2": Parts(),
    "exaone": Parts(),
    "exaone4": Parts(norms="head", norms_before=False, norms_after=True),
    "seed_oss": Parts(biases="qkv", renamed=True),
    "qwen2vl": Parts(biases="qkv", keys={"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": Parts(norms="head", keys={"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen3vlmoe": Parts(norms="head", experts=8, keys=EXPERTS | {"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen2moe": Parts(
        biases="qkv", experts=8, shared=True, keys=EXPERTS | {"expert_shared_feed_forward_length": 96}
    ),
    "glm4moe": Parts(
        biases="qkv",
        renamed=True,
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True},
    ),
    "ernie4_5-moe": Parts(
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_feed_forward_length": 96, "leading_dense_block_count": 1}
        | {"interleave_moe_layer_step": 1},
    ),
    "dots1": Parts(
        norms="head",
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS
        | {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 0.6, "expert_weights_norm": False},
    ),
    "bailingmoe2": Parts(
        fused=True,
        norms="head",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True}
        | {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "exaone-moe": Parts(
        norms="head",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "attention.sliding_window": 24},
    ),
    "minimax-m2": Parts(
        norms="all",
        experts=8,
        choice_bias=True,
        keys=EXPERTS | {"expert_gating_func": 2, "feed_forward_length": 64},
    ),
    "hy_v3": Parts(
        norms="head",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_feed_forward_length": 96, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True},
    ),
    "maple": Parts(
        norms="head",
        experts=8,
        keys=EXPERTS
        | {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False] * 32}
        | {"swiglu_clamp_exp": [0.5] * 64},
    ),
    "step35": Parts(
        norms="head",
        gated="heads",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | {"expert_shared_feed_forward_length": 96, "leading_dense_block_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "rope.freq_base_swa": 500.0}
        | {"attention.sliding_window": 24, "attention.sliding_window_pattern": [False, True] * 32}
        | {"swiglu_clamp_exp": [0.0, 0.5] * 32, "swiglu_clamp_shexp": [0.0, 0.3] * 32},
    ),
    "nanbeige": Parts(keys={"num_loops": 2}),
    "openelm": Parts(norms="head"),
    "paddleocr": Parts(keys={"rope.dimension_sections": [2, 3, 3, 0]}),
    "plm": Parts(
        latent="together",
        feed_forward="ungated",
        keys={"attention.kv_lora_rank": 64, "rope.dimension_count": 16}
        | {"attention.key_length": 48, "attention.value_length": 32},
    ),
    "kimi-linear": Parts(
        latent="apart",
        keyed=True,
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | LATENT
        | {"attention.key_length": 80, "attention.value_length": 64, "ssm.conv_kernel": 4, "kda.head_dim": 32}
        | {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "expert_gating_func": 2}
        | {"expert_weights_scale": 2.5, "expert_weights_norm": True},
    ),
    "bailingmoe3": Parts(
        latent="apart",
        keyed=True,
        gated="heads",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | LATENT
        | {"attention.key_length": 80, "attention.value_length": 64, "ssm.conv_kernel": 4, "kda.head_dim": 32}
        | {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.q_lora_rank": 96}
        | {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"kda.gate_lower_bound": -5.0},
    ),
    "minicpm3": Parts(
        latent="together",
        keys=LATENT | {"attention.key_length": 48, "attention.value_length": 32, "attention.q_lora_rank": 96},
    ),
    "bailingmoe": Parts(
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS | {"expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True},
    ),
    "dbrx": Parts(
        layer_norms="plain",
        fused=True,
        experts=8,
        keys={"expert_count": 8, "expert_used_count": 3, "attention.clamp_kqv": 1.0},
    ),
    "deepseek2-ocr": Parts(
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS | {"expert_shared_count": 2, "leading_dense_block_count": 1},
    ),
    "deepseek": Parts(
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS
        | {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.5},
    ),
    "deepseek2": Parts(
        latent="apart",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
        keys=EXPERTS
        | LATENT
        | YARN
        | {"attention.head_count_kv": 1, "attention.key_length": 80, "attention.value_length": 64}
        | {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.q_lora_rank": 96}
        | {"rope.scaling.yarn_log_multiplier": 0.1, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "mistral4": Parts(
        latent="apart",
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS
        | LATENT
        | {"attention.head_count_kv": 1, "attention.key_length": 80, "attention.value_length": 64}
        | {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.q_lora_rank": 96}
        | {"attention.temperature_scale": 0.3, "attention.temperature_length": 32}
        | {"expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 1},
    ),
    "deepseek2-lite": Parts(
        architecture="deepseek2",
        latent="together",
        experts=8,
        shared=True,
        ungated="elements",
        keys=EXPERTS
        | LATENT
        | YARN
        | {
            "attention.key_length": 48,
            "attention.value_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "smollm3": Parts(),
    "olmo2": Parts(norms="all", norms_before=False, norms_after=True),
    "olmoe": Parts(norms="all", experts=8, keys={"expert_count": 8, "expert_used_count": 2}),
    "qwen3moe": Parts(norms="head", experts=8, keys=EXPERTS),
    "gpt-oss": Parts(
        biases="all",
        experts=8,
        sinks=True,
        renamed=True,
        keys=EXPERTS | YARN | {"attention.sliding_window": 24},
    ),
    "qwen3next": Parts(
        norms="head",
        renamed=True,
        delta=True,
        fused_delta=True,
        experts=8,
        shared=True,
        keys=DELTA | EXPERTS | {"expert_shared_feed_forward_length": 96},
    ),
    "qwen35": Parts(norms="head", renamed=True, delta=True, thinks=True, keys=DELTA),
    "qwen35moe": Parts(
        norms="head",
        renamed=True,
        delta=True,
        experts=8,
        shared=True,
        thinks=True,
        keys=DELTA | EXPERTS | {"expert_shared_feed_forward_length": 96},
    ),
}
