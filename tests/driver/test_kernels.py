"""Kernels for GPUs in C, block by block and warp by warp, each warp as far ahead of the others as barriers allow."""

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.processes import side_by_side

CHECKS = (
    "attention_whole",
    "attention_split",
    "attention_on_tensor_cores",
    "epilogues",
    "prefill_attention",
    "sampling",
)


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    def run(check):
        folder = tmp_path_factory.mktemp("cache", numbered=True)
        environment = os.environ | {
            "DEV": "TEGRA+NV",
            "CACHEDB": str(folder / "cache.db"),
            "XDG_CACHE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.driver.checks", check]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    with side_by_side(request, run, "check") as started:
        yield started


@pytest.mark.parametrize("check", CHECKS)
def test_numbers_do_not_depend_on_the_order_of_warps(running, check):
    done = running[check,].result()
    assert done.returncode == 0, done.stderr[-3000:]
