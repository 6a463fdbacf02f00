"""Kernels for GPUs, and whole steps of models, without a GPU, against numpy.

The simulated board (tests/driver) runs them as compiled C, block by block and warp by warp, each warp as far ahead of
the others as barriers allow; every load and store is checked. Where there is no compiler for it, tinygrad's emulator
runs them. `alignment` proves of each kernel that its vector loads and stores are aligned.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver.compiler import compiler, keeping_kernels
from tests.paths import ROOT
from tests.thorough import THOROUGH, thorough

CHECKS = {
    name: file.stem
    for file in sorted(Path(__file__).parent.glob("check_*.py"))
    for name in re.findall(r"^def (check_\w+)\(", file.read_text(), re.MULTILINE)
}
"""The functions to run, and their modules."""

LONG = {  # other checks run the same kernels, in fewer steps of fewer models, or in fewer shapes
    "check_a_prompt_before_its_kernels_are_compiled",
    "check_a_prompt_by_warpgroups",
    "check_a_quantized_cache",
    "check_an_encoder_of_squares",
    "check_an_encoder_with_gates",
    "check_an_encoder_with_limits",
    "check_attention_of_patches",
    "check_capped_scores",
    "check_choice_of_experts",
    "check_chunks_leave_the_same_state",
    "check_delta_nets_of_one_token",
    "check_delta_nets_of_prompts_of_several_sequences",
    "check_down_of_chosen_experts",
    "check_drafts_after_a_long_prompt",
    "check_drafts_of_a_mixture",
    "check_drafts_of_an_assistant_after_a_long_prompt",
    "check_expert_products",
    "check_experts_whose_gate_and_up_differ_in_type",
    "check_gate_and_up_of_chosen_experts",
    "check_gated_heads",
    "check_guesses_of_several_sequences",
    "check_guesses_with_embeddings_and_shared_caches",
    "check_guesses_with_recurrent_states",
    "check_guesses_with_mamba",
    "check_guesses_with_short_convolutions",
    "check_head_sizes",
    "check_layers_of_fused_matrices",
    "check_layers_of_fused_matrices_with_biases",
    "check_layers_beside_attention_after_layer_norms",
    "check_layers_in_turn_after_layer_norms",
    "check_layers_side_by_side",
    "check_layers_whose_vectors_come_in_digits",
    "check_layers_with_capped_scores",
    "check_layers_with_delta_nets_and_gated_attention",
    "check_layers_with_embeddings_and_shared_caches",
    "check_layers_with_embeddings_of_positions",
    "check_layers_with_experts_and_wide_norms",
    "check_layers_with_experts_chosen_with_a_bias",
    "check_layers_with_experts_of_the_best_groups",
    "check_layers_with_keys_that_neighbours_share",
    "check_layers_with_a_recurrent_one_beside_attention",
    "check_layers_with_latent_attention",
    "check_layers_with_layer_norms_of_their_own",
    "check_layers_with_mamba",
    "check_layers_with_multipliers",
    "check_layers_with_norms_after_rotation",
    "check_layers_with_windows_and_norms_after",
    "check_layers_with_yarn_and_temperature",
    "check_layers_without_norms_before_them",
    "check_matrices_of_several_types",
    "check_mixed_delta_nets_and_gated_attention",
    "check_mixed_embeddings_and_shared_caches",
    "check_mixed_experts_sinks_and_biases",
    "check_mixed_experts_without_gates",
    "check_mixed_keys_that_neighbours_share",
    "check_mixed_layers_beside_attention",
    "check_mixed_layers_beside_attention_and_windows",
    "check_mixed_layers_in_turn_after_layer_norms",
    "check_mixed_layers_with_layer_norms_of_their_own",
    "check_mixed_norms_after_rotation",
    "check_mixed_recurrent_layers_beside_attention",
    "check_mixed_mamba",
    "check_mixed_short_convolutions",
    "check_mixed_latent_attention",
    "check_mixed_side_by_side",
    "check_mixed_steps_of_all_sizes",
    "check_mixed_windows_and_norms_after",
    "check_heads_of_latent_attention",
    "check_norms_over_all_heads",
    "check_pictures_whose_parts_alternate",
    "check_pieces_of_several_prompts",
    "check_post_norms",
    "check_products_beside_experts",
    "check_profile_of_a_prompt",
    "check_profile_of_experts",
    "check_prompts_of_several_sequences",
    "check_residual_with_bias",
    "check_router",
    "check_rows",
    "check_rows_of_one_sequence",
    "check_rows_of_several_sequences",
    "check_rows_of_what_is_stored",
    "check_rows_side_by_side",
    "check_rows_with_delta_nets_and_gated_attention",
    "check_rows_with_embeddings_and_shared_caches",
    "check_rows_with_experts_of_the_best_groups",
    "check_rows_with_experts_sinks_and_biases",
    "check_rows_with_latent_attention",
    "check_rows_with_windows_and_norms_after",
    "check_sampling",
    "check_sampling_of_a_lone_sequence",
    "check_shared_experts_whose_gate_and_up_differ_in_type",
    "check_sinks",
    "check_sinks_of_prompts",
    "check_small_batch_divided",
    "check_small_batch_epilogues",
    "check_small_batch_of_every_type",
    "check_sorted_assignments",
    "check_streams_of_layer_norms",
    "check_streams_of_norms_after_and_windows",
    "check_streams_of_prompts",
    "check_types_that_differ_in_a_layer",
    "check_what_is_stored",
    "check_windows",
}


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The error of each check that was selected, "" for one that passes."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["check"] for item in items]
    device = "TEGRA+NV" if compiler() else "PYTHON::sm_90"
    checks = [f"{CHECKS[name]}.{name}" for name in selected if THOROUGH or name not in LONG]
    command = [sys.executable, "-m", "tests.kernels.gpu.run_checks", *checks]
    # What packs matrices are plain loops here, which are less to compile, and optimized in test_decode.py.
    env = keeping_kernels(DEV=device, PARALLEL="0", NOOPT=str(int(not THOROUGH)))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    return {result["check"]: result["error"] for result in results}


@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=thorough) if name in LONG else name for name in CHECKS]
)
def test_numbers(errors: dict[str, str], check: str) -> None:
    assert not errors[check], errors[check]
