"""Decode steps of small models, whose residual stream is held against the reference's after each sublayer."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tinygrad import UOp
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops

from engine.description.altup import Modes
from engine.description.feed_forward import Experts, SideBySide
from engine.model.memory_need import memory_need
from engine.runtime.kv_blocks import KVBlocks
from engine.targets.nvidia import matrices
from engine.targets.nvidia.kernels.products.schedules import Place, best_schedule
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, StackedMatrices
from engine.targets.nvidia.memory import MEMORY
from engine.targets.nvidia.runner import NvidiaRunner
from engine.targets.nvidia.sublayers.experts import chosen_experts
from tests import generated_model
from tests.kernels.gpu.buffers import brings_to_cache
from tests.opened import opened
from tests.reference import Reference, wrong_by

CONTEXT = 64
TOKENS = [3, 77, 5, 130, 9, 200, 41]  # more than a window
# As other checks have it: kernels in common.
SMALL = {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 1}


def check_layers_with_windows_and_norms_after() -> None:
    keys = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
    hold(architecture="gemma3", keys=keys, **SMALL | {"layers": 2})


def check_layers_without_norms_before_them() -> None:
    hold(architecture="olmo2", **SMALL)


def check_layers_with_yarn_and_temperature() -> None:
    keys = {"rope.scaling.original_context_length": 5}
    hold(architecture="mistral3", keys=keys, **SMALL)


def check_layers_of_fused_matrices() -> None:
    hold(architecture="phi3", rotated=12, keys={"rope.scaling.original_context_length": 8}, **SMALL)


def check_layers_of_fused_matrices_with_biases() -> None:
    hold(architecture="chatglm", rotated=8, **SMALL)


def check_layers_with_capped_scores() -> None:
    hold(architecture="gemma2", keys={"attention.sliding_window": 4}, **SMALL | {"layers": 2})


def check_layers_with_multipliers() -> None:
    hold(architecture="granite", **SMALL)


def check_layers_with_experts_and_wide_norms() -> None:
    hold(architecture="olmoe", **SMALL)


def check_layers_with_experts_sinks_and_biases() -> None:
    keys = {"attention.sliding_window": 4}
    hold(architecture="gpt-oss", keys=keys, **SMALL | {"layers": 2})


def check_layers_whose_norms_have_no_weights() -> None:
    hold(architecture="olmo", keys={"attention.clamp_kqv": 0.0}, **SMALL)


def check_layers_without_attention_or_a_feed_forward_layer() -> None:
    hold(architecture="deci", **SMALL | {"layers": 3})


def check_layers_with_a_gate_of_attention_and_scored_experts() -> None:
    keys = {"attention.sliding_window": 4, "expert_used_count": 2}
    hold(architecture="afmoe", keys=keys, **SMALL | {"layers": 2})


def check_layers_with_a_norm_of_embeddings() -> None:
    """And post norms with an eps of their own."""
    hold(architecture="muse-glimmer", keys={"attention.sliding_window": 4}, **SMALL | {"layers": 2})


def check_layers_with_gates_of_heads() -> None:
    keys = {"attention.sliding_window": 4}
    hold(architecture="laguna", keys=keys | {"expert_used_count": 2}, **SMALL | {"layers": 2})
    hold(architecture="spark2_5", keys=keys, **SMALL | {"layers": 2})


def check_layers_with_limits_of_experts() -> None:
    keys = {"attention.sliding_window": 4, "expert_used_count": 2}
    hold(architecture="step35", keys=keys, **SMALL | {"layers": 2})


def check_layers_that_run_several_times() -> None:
    hold(architecture="nanbeige", **SMALL)


def check_layers_within_limits() -> None:
    hold(architecture="olmo", **SMALL)


def check_layers_with_curves() -> None:
    hold(architecture="apertus", **SMALL | {"layers": 2})


def check_layers_in_chunks_with_weighed_inputs() -> None:
    keys = {"attention.sliding_window": 4, "attention.temperature_length": 4}
    hold(architecture="llama4", keys=keys, **SMALL | {"layers": 4})


def check_layers_with_layer_norms_of_heads() -> None:
    hold(architecture="command-r-plus", **SMALL)
    hold(architecture="stablelm-12b", **SMALL)


def check_layers_with_experts_after_layer_norms() -> None:
    hold(architecture="phimoe", keys={"expert_used_count": 2}, **SMALL)


def check_layers_whose_scores_fall_with_the_distance() -> None:
    hold(architecture="bloom", **SMALL)
    hold(architecture="mpt", **SMALL)
    hold(architecture="refact", **SMALL)


def check_layers_with_streams() -> None:
    hold(architecture="gemma3n", **SMALL | {"layers": 4})


def check_layers_with_delta_nets_and_gated_attention() -> None:
    hold(architecture="qwen35", rotated=8, **SMALL | {"layers": 2})


def check_layers_with_keys_that_neighbours_share() -> None:
    hold(architecture="qwen3next", rotated=8, **SMALL | {"dim": 160, "heads": 5, "layers": 2})


def check_layers_with_mamba() -> None:
    hold(architecture="nemotron_h", **SMALL | {"layers": 3})  # each of another kind, one without gates


def check_layers_with_experts_without_gates() -> None:
    hold(architecture="nemotron_h_moe", **SMALL | {"layers": 3})


def check_layers_with_short_convolutions() -> None:
    hold(architecture="lfm2moe", **SMALL | {"layers": 2})


def check_layers_beside_attention_after_layer_norms() -> None:
    hold(architecture="command-r", **SMALL)


def check_layers_beside_attention_with_biases() -> None:
    hold(architecture="phi2", rotated=8, tied=False, **SMALL)


def check_layers_with_layer_norms_of_their_own() -> None:
    hold(architecture="gptneox", **SMALL)


def check_layers_with_embeddings_of_positions() -> None:
    hold(architecture="gpt2", **SMALL)


def check_layers_in_turn_after_layer_norms() -> None:
    hold(architecture="nemotron", rotated=8, **SMALL)


def check_layers_with_a_recurrent_one_beside_attention() -> None:
    hold(architecture="falcon-h1", **SMALL)


def check_layers_with_norms_after_rotation() -> None:
    hold(architecture="hunyuan-dense", **SMALL)


def check_layers_with_embeddings_and_shared_caches() -> None:
    hold(architecture="gemma4", **SMALL | {"layers": 4})


def check_layers_side_by_side() -> None:
    hold(architecture="gemma4-moe", **SMALL | {"dim": 192, "heads": 4, "kv_heads": 2, "layers": 2})


def check_layers_with_delta_nets_and_shared_experts() -> None:
    hold(architecture="qwen35moe", rotated=8, **SMALL | {"layers": 2})


def check_layers_with_experts_of_the_best_groups() -> None:
    hold(architecture="bailingmoe2", **SMALL | {"layers": 2})


def check_layers_with_experts_chosen_with_a_bias() -> None:
    hold(architecture="ernie4_5-moe", **SMALL | {"layers": 2})


def check_layers_with_latent_attention() -> None:
    hold(architecture="deepseek2", **SMALL | {"layers": 2})


def check_layers_with_latent_attention_and_temperature() -> None:
    hold(architecture="mistral4", keys={"attention.temperature_length": 4}, **SMALL | {"layers": 2})


def check_layers_with_latent_attention_of_older_files() -> None:
    hold(architecture="deepseek2-lite", **SMALL)


def check_layers_whose_vectors_come_in_digits() -> None:
    """Products after a norm, before a norm, of narrow queries, and of several matrices, which take their vector as it
    is; experts whose router makes those of gate and up, and these those of down; layers each of whose products makes
    those of the next one, which also bring its weights to the cache."""
    types = {"blk.0.attn_k": "Q8_0", "blk.*": "IQ4_NL"}
    forced = lambda stack, _: replace(stack, digits=stack.fits_digits)
    with mock.patch.object(matrices, "in_digits", forced):
        hold(architecture="gemma3", types=types, **SMALL | {"dim": 128, "layers": 2})
        keys = {"attention.q_lora_rank": 128}
        hold(architecture="deepseek2", types={"blk.*.attn_q_b": "IQ4_NL"}, keys=keys, **SMALL | {"layers": 1})

        def wide(stack: StackedMatrices, _: Place) -> Schedule:
            if stack.experts and stack.experts.chooses:
                return Schedule(2, 32, 2)
            (layout, _), *_ = stack.matrices
            return best_schedule(stack) if layout.format else Schedule(2, 4, 1)  # of the router

        with mock.patch.object(matrices, "best_schedule", wide):
            hold(architecture="gpt-oss", types={"blk.*_exps": "IQ4_NL"}, **SMALL | {"dim": 128, "layers": 1})
        launched = {"early_end": True, "brings": int(brings_to_cache())}
        high = lambda stack, _: Schedule(2, 32, 2 if stack.rows > 128 else 1, **launched)
        with mock.patch.object(matrices, "best_schedule", high):
            hold(
                architecture="llama",
                types={"blk.1.*": "Q4_0", "blk.*": "IQ4_NL"},
                **SMALL | {"dim": 128, "ffn": 128, "layers": 2},
            )


def hold(**shape: Any) -> None:
    """Raises AssertionError if an element of the stream differs from the reference's by more than 4e-3 of the stream's
    root mean square at that token: keys, values and activations are float16. Or if the experts are not those that the
    reference chooses for the same stream, and no tie."""
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(Path(folder) / "model.gguf", quant="Q8_0", **shape)
        weights, reference = opened(path), Reference(path, CONTEXT)
    wanted = reference.streams(TOKENS)
    runner = NvidiaRunner(weights, CONTEXT)
    model, need = runner._model, memory_need(weights.spec, CONTEXT, "nvidia")
    assert need.cache_bytes == sum(t.nbytes() for a in model.storing for t in a.cache)
    planes = [plane for matrix in model.matrices for plane in matrix.planes]
    routers = [of.router for of in model.spec.operators if isinstance(of, Modes)]  # these are floats
    weights_bytes = need.weights_bytes - sum(map(MEMORY.weight_bytes, {*routers}))
    assert weights_bytes == model.spec.vector_bytes + sum(plane.nbytes() for plane in planes)
    states = [*(d.memory for d in model.recurrent), *runner._states.checkpoints]
    assert need.states_bytes == sum(t.nbytes() for t in states)
    KVBlocks(runner).reserve(0, len(TOKENS))
    runner._tables.send()
    stream = runner._one.h
    calls = runner._steps.kernels(1, runner._steps.limits(1)[0]).compile().src
    found = [i + 1 for i, call in enumerate(calls) if call.src[1] is stream.uop.base]
    ends, following = found[:1], iter(found[1:])
    for sublayer_of, is_beside in reference.spec.blocks:  # what is normed is added with what is beside it
        if sublayer_of.renewed:
            next(following)
        ends.append(ends[-1] if is_beside and sublayer_of.post_norm else next(following))
    assert len(ends) == len(wanted) and not [*following]
    for position, token in enumerate(TOKENS):
        runner._send_token(token, position)
        streams, choices = [], []
        for sublayer, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > first:
                realize.run_linear(UOp(Ops.LINEAR, src=tuple(calls[first:end])), jit=True)
            want, got = wanted[sublayer][position], stream.numpy().copy()
            streams.append(got - got.mean() if reference.spec.centred else got)
            operator = reference.spec.sublayers[sublayer - 1].operator if sublayer else None
            operator = operator.experts if isinstance(operator, SideBySide) else operator
            if isinstance(operator, Experts):
                choices.append(chosen_experts(runner._one, operator.used)["experts"].numpy().copy())
            if sublayer and [*reference.spec.blocks][sublayer - 1][1]:
                continue  # it has the result already of which the reference's gets that of the next sublayer too
            worst = np.abs(streams[-1] - want).max() / np.sqrt((want * want).mean())
            assert worst < 4e-3, f"at {position}, after sublayer {sublayer}: {worst}"
        for router, chosen in zip(reference.routers([s[None] for s in streams[:-1]]), choices, strict=True):
            assert wrong_by(router, chosen[None]).max() < 1e-4, f"at {position}"
