"""Kernels for GPUs in C, block by block and warp by warp, each warp as far ahead of the others as barriers allow."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    "attention_whole",
    "attention_split",
    "attention_on_tensor_cores",
    "epilogues",
    "prefill_attention",
    "sampling",
)


def test_numbers_do_not_depend_on_the_order_of_warps(tmp_path):
    environment = os.environ | {
        "DEV": "TEGRA+NV",
        "CACHEDB": str(tmp_path / "cache.db"),
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.driver.checks", *CHECKS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
