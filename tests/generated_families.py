"""What the files of each architecture have beyond llama's, for `generated_model`."""

from __future__ import annotations

from tests.generated_parts import EPSILON, Parts

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
SWA = {"attention.sliding_window": 24}
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
ONE_SHARED = {"expert_shared_count": 1, "leading_dense_block_count": 1}
MLA = {
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
}
INDEXER = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 1024,
}
SCAN = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 128}
LOW_RANKS = {
    "wkv.head_size": 64,
    "attention.decay_lora_rank": 32,
    "attention.iclr_lora_rank": 64,
    "attention.value_residual_mix_lora_rank": 32,
}
OLDER = {"wkv.head_size": 32, "time_mix_extra_dim": 32, "time_decay_extra_dim": 32}
LAYER_NORMS = Parts(layer_norms="biases")
BIASED = LAYER_NORMS.but(biases="all")
UNGATED = BIASED.but(feed_forward="ungated")  # as GPT-2 has it
GEMMA = Parts(norms="head", norms_after=True)
COMMAND = Parts(layer_norms="plain", feed_forward="gated beside", keys={"logit_scale": 0.25})
MIXTURE = Parts(experts=8, keys=EXPERTS)
SHARED = MIXTURE.but(shared=True, ungated="elements")
CHOSEN = SHARED.but(SIGMOID, choice_bias=True)
GRANITE = Parts(keys=MULTIPLIERS)
MAMBAS = Parts(mamba=True, keys=MAMBA)
NEMOTRON_H = MAMBAS.but({"attention.layer_norm_epsilon": EPSILON}, lone="ME*", feed_forward="ungated")
DELTAS = Parts(norms="head", renamed=True, delta=True, keys=DELTA)
SHARED_DELTAS = DELTAS.but(EXPERTS | {"expert_shared_feed_forward_length": 96}, experts=8, shared=True)
CONNECTIONS = {
    "rope.dimension_sections": [2, 2, 2, 0],
    "hyper_connection.count": 4,
    "hyper_connection.low_rank": 32,
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 32,
    "attention.compress_ratios": 4,
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 1,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 7,
    "ple.layer_multipliers": (6364136223846793005, 1442695040888963407, 3202034522624059733),
    "ple.head_offsets": (0, 101),
    "ple.head_vocab_sizes": (101, 97),
    "embedding_length_per_layer_input": 32,
}
KEYED = CHOSEN.but(
    LATENT | MLA | {"expert_weights_scale": 2.5, "ssm.conv_kernel": 4, "kda.head_dim": 32},
    latent="apart",
    keyed=True,
)
ARCHITECTURES: dict[str, Parts] = {
    "mamba": Parts(scan=True, lone="M", keys=SCAN | {"ssm.dt_b_c_rms": True, "attention.head_count_kv": 0}),
    "mamba2": MAMBAS.but({"attention.head_count_kv": 0}, lone="M"),
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
        keys=SWA
        | {"attention.temperature_length": 32, "interleave_moe_layer_step": 2, "expert_weights_scale": 1.0}
        | {"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 64},
    ),
    "qwen2": Parts(biases="qkv"),
    "qwen3": Parts(norms="head", thinks=True),
    "mistral3": Parts(
        keys=YARN | {"rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.3}
    ),
    "phi3": Parts(  # with the factors of contexts of more than 64 tokens and of the others
        fused=True, keys={"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2}
    ),
    "gemma3": GEMMA.but(WINDOW),
    "plamo": Parts(feed_forward="gated beside"),
    "plamo2": Parts(
        scan=True,
        head_scan=True,
        fused=True,
        norms="heads",
        norms_after=True,
        keys=SCAN | {"ssm.time_step_rank": 4, "ssm.group_count": 0},
    ),
    "plamo3": GEMMA.but(
        SWA | {"attention.sliding_window_pattern": [True, False] * 32, "rope.freq_base_swa": 500.0},
        fused=True,
    ),
    "gemma4": GEMMA.but(GEMMA4 | {"embedding_length_per_layer_input": 32}, layers=True, scaled=True),
    "gemma4-moe": GEMMA.but(
        GEMMA4 | EXPERTS | {"attention.head_count_kv": [2, 1] * 4},
        architecture="gemma4",
        experts=8,
        beside=True,
        scaled=True,
    ),
    "gemma3n": GEMMA.but(
        {key: value for key, value in GEMMA4.items() if not key.endswith(("length_swa", "count_swa"))}
        | {"embedding_length_per_layer_input": 32}
        | {"activation_sparsity_scale": [1.2, 0.3] + [float("-inf")] * 62},
        layers=True,
        streams=True,
    ),
    "talkie": Parts(norms_before=False, begin=True, keys={"logit_scale": 0.7}),
    "rwkv6": LAYER_NORMS.but(
        OLDER | {"rescale_every_n_layers": 1}, mixing=True, older=True, embedding_norm=True
    ),
    "rwkv6qwen2": Parts(
        mixing=True, older=True, keys=OLDER | {"token_shift_count": 1, "attention.head_count_kv": 1}
    ),
    "rwkv7": LAYER_NORMS.but(LOW_RANKS | {"attention.gate_lora_rank": 64}, mixing=True, embedding_norm=True),
    "arwkv7": Parts(mixing=True, keys=LOW_RANKS | {"token_shift_count": 1}),
    "granite": GRANITE,
    "granitemoe": GRANITE.but({"expert_count": 8, "expert_used_count": 2}, experts=8),
    "minicpm": Parts(keys={"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}),
    "gemma": Parts(),
    "gemma2": Parts(
        norms_after=True, keys=SWA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 10.0}
    ),
    "command-r": COMMAND,
    "cohere2": COMMAND.but(SWA),
    "cohere2moe": COMMAND.but(
        EXPERTS | ONE_SHARED | SWA | {"expert_weights_norm": True}, experts=8, shared=True, ungated="elements"
    ),
    "command-r-plus": COMMAND.but(architecture="command-r", norms="heads"),
    "stablelm-12b": LAYER_NORMS.but(architecture="stablelm", norms="heads", feed_forward="gated beside"),
    "baichuan": Parts(keys={"attention.max_alibi_bias": 8.0}),
    "refact": Parts(),
    "apertus": Parts(
        norms="head",
        feed_forward="ungated",
        keys={"xielu.alpha_n": [0.5, 0.8] * 8, "xielu.alpha_p": [0.7, 1.1] * 8}
        | {"xielu.beta": [0.5, 0.4] * 8, "xielu.eps": [-1e-6] * 16},
    ),
    "codeshell": UNGATED.but(fused=True),
    "deci": Parts(partial="LFA"),
    "olmo": Parts(layer_norms="none", keys={"attention.clamp_kqv": 1.0}),
    "qwen": Parts(biases="qkv", fused=True, halved=True),
    "granite_swa": GRANITE.but(
        SWA
        | {
            "attention.sliding_window_pattern": [True, False] * 32,
            "attention.rope_pattern": [1, 1, 0, 1] * 16,
        },
        sinks=True,
    ),
    "mellum": MIXTURE.but(SWA, norms="head"),
    "phimoe": MIXTURE.but(
        {"feed_forward_length": 64, "attention.layer_norm_rms_epsilon": EPSILON},
        layer_norms="biases",
        biases="qkvo",
    ),
    "afmoe": CHOSEN.but(ONE_SHARED | SWA, norms="head", norms_after=True, gated="elements"),
    "jais": BIASED.but({"attention.max_alibi_bias": 8.0}, fused=True, feed_forward="gated biases"),
    "jais2": UNGATED,
    "muse-glimmer": GEMMA.but(
        SWA | {"logit_scale": 0.25, "final_logit_softcapping": 10.0, "rope.freq_base_swa": 500.0},
        gated="elements",
    ),
    "laguna": CHOSEN.but(
        ONE_SHARED
        | SWA
        | {"rope.freq_base_swa": 500.0, "rope.dimension_count_swa": 16}
        | {key: value for key, value in YARN.items() if "beta" not in key},
        norms="head",
        gated="heads",
    ),
    "spark2_5": Parts(
        gated="heads",
        keys=SWA | {"attention.sliding_window_pattern": [True, False] * 32, "rope.freq_base_swa": 500.0},
    ),
    "mpt": Parts(
        layer_norms="plain",
        fused=True,
        feed_forward="ungated",
        keys={"attention.clamp_kqv": 1.0, "attention.max_alibi_bias": 8.0},
    ),
    "bloom": UNGATED.but(fused=True, embedding_norm=True),
    "jina-bert-v2": BIASED.but(BOTH_WAYS, normed_after=True),
    "stablelm": LAYER_NORMS.but(biases="qkv"),
    "starcoder2": UNGATED,
    "phi2": BIASED.but(fused=True, feed_forward="ungated beside"),
    "gptneox": UNGATED.but({"use_parallel_residual": True}, fused=True),
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
    "gpt2": UNGATED.but(fused=True, positions=True),
    "starcoder": UNGATED.but(fused=True, positions=True),
    "neo-bert": Parts(fused=True, keys=BOTH_WAYS),
    "bert": UNGATED.but(BOTH_WAYS, positions=True, normed_after=True),
    "nomic-bert": LAYER_NORMS.but(BOTH_WAYS, fused=True, normed_after=True),
    "nomic-bert-moe": UNGATED.but(
        BOTH_WAYS | {"expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2},
        fused=True,
        normed_after=True,
        experts=4,
    ),
    "gemma-embedding": GEMMA.but(BOTH_WAYS | WINDOW | {"attention.sliding_window": 32}),
    "falcon": LAYER_NORMS.but(fused=True, feed_forward="ungated beside"),
    "nemotron": LAYER_NORMS.but(feed_forward="ungated"),
    "orion": LAYER_NORMS,
    "falcon-h1": MAMBAS.but(mamba_beside=True),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H.but(
        EXPERTS | SIGMOID | {"expert_shared_feed_forward_length": 96, "expert_shared_count": 1},
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
    ),
    "nemotron_h_moe-narrow": NEMOTRON_H.but(
        EXPERTS
        | SIGMOID
        | {
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1,
            "moe_latent_size": 32,
        },
        architecture="nemotron_h_moe",
        experts=8,
        shared=True,
        ungated="elements",
        choice_bias=True,
    ),
    "granitehybrid": MAMBAS.but(
        MULTIPLIERS
        | {"rope.scaling.finetuned": False}
        | {"expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 96},
        experts=8,
        shared=True,
        ungated="elements",
    ),
    "lfm2": Parts(norms="head", conv=True, keys={"shortconv.l_cache": 3}),
    "lfm2moe": MIXTURE.but(
        {"shortconv.l_cache": 3, "leading_dense_block_count": 1, "expert_gating_func": 2},
        norms="head",
        conv=True,
        choice_bias=True,
    ),
    "hunyuan-dense": Parts(norms="head"),
    "hunyuan_vl": Parts(
        norms="head", keys={"rope.dimension_sections": [2, 2, 2, 2], "rope.scaling.alpha": 1.5}
    ),
    "smallthinker": MIXTURE.but({"attention.sliding_window": 4096, "expert_gating_func": 2}),
    "hunyuan-moe": SHARED.but(
        {"feed_forward_length": 64, "expert_shared_feed_forward_length": 96}, norms="head"
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
    "qwen3vlmoe": MIXTURE.but({"rope.dimension_sections": [3, 3, 2, 0]}, norms="head"),
    "qwen2moe": MIXTURE.but({"expert_shared_feed_forward_length": 96}, biases="qkv", shared=True),
    "glm4moe": SHARED.but(
        ONE_SHARED | {"expert_weights_scale": 1.5, "expert_weights_norm": True},
        biases="qkv",
        renamed=True,
        choice_bias=True,
    ),
    "ernie4_5-moe": SHARED.but(
        {"expert_shared_feed_forward_length": 96, "leading_dense_block_count": 1}
        | {"interleave_moe_layer_step": 1},
        choice_bias=True,
    ),
    "dots1": SHARED.but(
        SIGMOID
        | {"expert_shared_count": 2, "leading_dense_block_count": 1}
        | {"expert_weights_scale": 0.6, "expert_weights_norm": False},
        norms="head",
    ),
    "bailingmoe2": CHOSEN.but(
        ONE_SHARED | {"expert_group_count": 4, "expert_group_used_count": 2}, fused=True, norms="head"
    ),
    "exaone-moe": CHOSEN.but(ONE_SHARED | SWA, norms="head"),
    "minimax-m2": MIXTURE.but(
        {"expert_gating_func": 2, "feed_forward_length": 64}, norms="all", choice_bias=True
    ),
    "minimax-m3": CHOSEN.but(
        ONE_SHARED
        | INDEXER
        | {"attention.indexer.top_k": 16, "attention.indexer.block_size": 64}
        | {"attention.indexer.local_blocks": 1},
        norms="head",
    ),
    "mimo2": MIXTURE.but(
        SWA
        | {"attention.sliding_window_pattern": [True, False] * 8, "rope.freq_base_swa": 500.0}
        | {"attention.value_length": 8, "attention.value_scale": 0.7},
        choice_bias=True,
        sinks=True,
    ),
    "hy_v3": CHOSEN.but(
        {"expert_shared_feed_forward_length": 96, "leading_dense_block_count": 1}, norms="head"
    ),
    "maple": MIXTURE.but(
        SWA | {"attention.sliding_window_pattern": [True, False] * 32, "swiglu_clamp_exp": [0.5] * 64},
        norms="head",
    ),
    "step35": CHOSEN.but(
        SWA
        | {"expert_shared_feed_forward_length": 96, "leading_dense_block_count": 1}
        | {"rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": [False, True] * 32}
        | {"swiglu_clamp_exp": [0.0, 0.5] * 32, "swiglu_clamp_shexp": [0.0, 0.3] * 32},
        norms="head",
        gated="heads",
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
    "kimi-linear": KEYED,
    "bailingmoe3": KEYED.but({"attention.q_lora_rank": 96, "kda.gate_lower_bound": -5.0}, gated="heads"),
    "minicpm3": Parts(
        latent="together",
        keys=LATENT | {"attention.key_length": 48, "attention.value_length": 32, "attention.q_lora_rank": 96},
    ),
    "bailingmoe": SHARED.but(
        {"expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True}
    ),
    "dbrx": Parts(
        layer_norms="plain",
        fused=True,
        experts=8,
        keys={"expert_count": 8, "expert_used_count": 3, "attention.clamp_kqv": 1.0},
    ),
    "deepseek2-ocr": SHARED.but({"expert_shared_count": 2, "leading_dense_block_count": 1}),
    "deepseek": SHARED.but(
        {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.5}
    ),
    "deepseek32": CHOSEN.but(
        LATENT
        | MLA
        | INDEXER
        | {"attention.head_count_kv": 1, "attention.q_lora_rank": 96, "expert_weights_scale": 2.5},
        latent="apart",
    ),
    "glm-dsa": CHOSEN.but(
        LATENT | MLA | INDEXER | {"attention.head_count_kv": 1, "attention.q_lora_rank": 96}, latent="apart"
    ),
    "deepseek2": CHOSEN.but(
        LATENT
        | YARN
        | MLA
        | {"attention.head_count_kv": 1, "attention.q_lora_rank": 96}
        | {"rope.scaling.yarn_log_multiplier": 0.1, "expert_weights_scale": 2.5}
        | {"expert_group_count": 4, "expert_group_used_count": 2},
        latent="apart",
    ),
    "mistral4": SHARED.but(
        LATENT
        | MLA
        | {"attention.head_count_kv": 1, "attention.q_lora_rank": 96}
        | {"attention.temperature_scale": 0.3, "attention.temperature_length": 32}
        | {"expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 1},
        latent="apart",
    ),
    "deepseek2-lite": SHARED.but(
        LATENT
        | YARN
        | {"attention.key_length": 48, "attention.value_length": 32}
        | {"rope.scaling.yarn_log_multiplier": 0.0707},
        architecture="deepseek2",
        latent="together",
    ),
    "smollm3": Parts(),
    "olmo2": Parts(norms="all", norms_before=False, norms_after=True),
    "olmoe": Parts(norms="all", experts=8, keys={"expert_count": 8, "expert_used_count": 2}),
    "qwen3moe": MIXTURE.but(norms="head"),
    "gpt-oss": MIXTURE.but(YARN | SWA, biases="all", sinks=True, renamed=True),
    "qwen3next": SHARED_DELTAS.but(fused_delta=True),
    "qwen35": DELTAS.but(thinks=True),
    "qwen35moe": SHARED_DELTAS.but(thinks=True),
    "qwen4exp": SHARED_DELTAS.but(CONNECTIONS, connections=True),
}
