"""Kernels for GPUs without a GPU, against numpy.

The simulated board (tests/driver) runs them as compiled C, block by block and warp by warp, each warp as far ahead of
the others as barriers allow; every load and store is checked. Where there is no compiler for it, tinygrad's emulator
runs them.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.driver.compiler import compiler
from tests.paths import ROOT

CHECKS = (
    "formats",
    "embedding",
    "epilogues",
    "mixtures",
    "prefill_products",
    "attention_whole",
    "attention_split",
    "attention_on_tensor_cores",
    "prefill_attention",
    "sampling",
    "model",
    "profiled_prefill",
    "rule",
)


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The error of each check that was selected, "" for one that passes."""
    selected = [item.callspec.params["check"] for item in request.session.items if item.path == request.path]
    device = "TEGRA+NV" if compiler() else "PYTHON::sm_90"
    command = [sys.executable, "-m", "tests.kernels.gpu.run_checks", *selected]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"DEV": device}, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    return {result["check"]: result["error"] for result in results}


@pytest.mark.parametrize("check", CHECKS)
def test_numbers(errors: dict[str, str], check: str) -> None:
    assert not errors[check], errors[check]
