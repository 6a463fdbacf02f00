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


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The error of each check that was selected, "" for one that passes."""
    selected = [item.callspec.params["check"] for item in request.session.items if item.path == request.path]
    device = "TEGRA+NV" if compiler() else "PYTHON::sm_90"
    checks = [f"{CHECKS[name]}.{name}" for name in selected]
    command = [sys.executable, "-m", "tests.kernels.gpu.run_checks", *checks]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"DEV": device}, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    return {result["check"]: result["error"] for result in results}


@pytest.mark.parametrize("check", CHECKS)
def test_numbers(errors: dict[str, str], check: str) -> None:
    assert not errors[check], errors[check]
