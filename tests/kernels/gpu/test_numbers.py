"""Kernels for GPUs without a GPU, against numpy.

The simulated board (tests/driver) runs them as compiled C, block by block and warp by warp, each warp as far ahead of
the others as barriers allow; every load and store is checked. Where there is no compiler for it, tinygrad's emulator
runs them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver.compiler import compiler
from tests.paths import ROOT

CHECKS = {
    name: file.stem
    for file in sorted(Path(__file__).parent.glob("check_*.py"))
    for name in re.findall(r"^def (check_\w+)\(", file.read_text(), re.MULTILINE)
}
"""The functions to run, and their modules."""

THOROUGH = {  # which take a minute each: other checks run the same kernels, in fewer steps of fewer models
    "check_chunks_leave_the_same_state",
    "check_head_sizes",
    "check_rows_side_by_side",
    "check_rows_with_delta_nets_and_gated_attention",
    "check_rows_with_embeddings_and_shared_caches",
    "check_rows_with_windows_and_norms_after",
}
SELECTED = [
    pytest.param(
        name, marks=pytest.mark.skipif(not os.environ.get("ORIN_THOROUGH"), reason="ORIN_THOROUGH is not set")
    )
    if name in THOROUGH
    else name
    for name in CHECKS
]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The error of each check that was selected, "" for one that passes."""
    items = [item for item in request.session.items if item.path == request.path]
    runs = [item for item in items if not any(m.args[0] for m in item.iter_markers("skipif"))]
    selected = [item.callspec.params["check"] for item in runs]
    device = "TEGRA+NV" if compiler() else "PYTHON::sm_90"
    checks = [f"{CHECKS[name]}.{name}" for name in selected]
    command = [sys.executable, "-m", "tests.kernels.gpu.run_checks", *checks]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"DEV": device}, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    return {result["check"]: result["error"] for result in results}


@pytest.mark.parametrize("check", SELECTED)
def test_numbers(errors: dict[str, str], check: str) -> None:
    assert not errors[check], errors[check]
