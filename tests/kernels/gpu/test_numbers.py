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
from tests.thorough import THOROUGH, rarely

CHECKS = {
    name: file.stem
    for file in sorted(Path(__file__).parent.glob("check_*.py"))
    for name in re.findall(r"^def (check_\w+)\(", file.read_text(), re.MULTILINE)
}
"""The functions to run, and their modules."""

COMMON = {
    "check_activations",
    "check_any_shape_has_a_schedule",
    "check_attention_of_patches",
    "check_checkpoints_of_states",
    "check_copied_products",
    "check_decode_attention",
    "check_delta_nets_of_several_prompts",
    "check_delta_nets_of_several_sequences",
    "check_digits",
    "check_embedding",
    "check_every_type",
    "check_exports",
    "check_half_words",
    "check_layer_norms",
    "check_layers_with_a_recurrent_one_beside_attention",
    "check_layers_with_latent_attention_of_older_files",
    "check_layers_with_short_convolutions",
    "check_probes",
    "check_products_of_few_tokens_with_experts",
    "check_rows_over_a_quantized_cache",
    "check_sampling_of_rows",
    "check_schedules_of_experts",
    "check_small_batch_sliced",
    "check_warpgroup_products",
    "check_whole_mixture",
    "check_windows_of_prompts",
}
"""One of each family of kernels, and what is fused with them in layers. A whole model is in
`tests/driver/test_decode.py`. All others repeat these kernels in other shapes, types and orders, for other layers:
whoever changes the target for NVIDIA GPUs runs them."""


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The error of each check that was selected, "" for one that passes."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["check"] for item in items]
    device = "TEGRA+NV" if compiler() else "PYTHON::sm_90"
    checks = [f"{CHECKS[name]}.{name}" for name in selected if THOROUGH or name in COMMON]
    command = [sys.executable, "-m", "tests.kernels.gpu.run_checks", *checks]
    # What packs matrices are plain loops here, which are less to compile, and optimized in test_decode.py.
    env = keeping_kernels(DEV=device, PARALLEL="0", NOOPT=str(int(not THOROUGH)))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[:3000]
    return {result["check"]: result["error"] for result in results}


@pytest.mark.parametrize("check", [name if name in COMMON else rarely(name) for name in CHECKS])
def test_numbers(errors: dict[str, str], check: str) -> None:
    assert not errors[check], errors[check]
