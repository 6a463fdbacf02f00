"""That every kernel for NVIDIA GPUs compiles for the chips that we name, with CUDA's own compiler and no GPU."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT

CHIPS = {87: "Jetson AGX Orin", 89: "GeForce RTX 40", 90: "H100, H200"}
FAMILIES = (
    "embed", "qkv", "attention", "combine", "o_", "gate_up", "down", "head", "next_token", "biased", "mixed",
    "activate", "penalize", "leaders", "ranked", "draw",
    "prefill_embed", "prefill_norm", "prefill_qkv", "prefill_rotate", "prefill_tile", "prefill_attend", "prefill_o",
    "prefill_gate_up", "prefill_down", "prefill_activate",
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("rendered") / "all.cu"
    env = {"DEV": "NULL:NVCC:sm_87", "NULL_ALLOW_COPYOUT": "1", "PARALLEL": "0", "CACHELEVEL": "0"}
    command = [sys.executable, "-m", "tests.kernels.gpu.rendered", str(path)]
    done = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.mark.skipif(not shutil.which("nvcc"), reason="CUDA's compiler is not installed")
def test_every_kernel_compiles_for_every_chip(source):
    names = re.findall(r"__launch_bounds__\([^)]*\) (\w+)\(", source.read_text())
    missing = [family for family in FAMILIES if not any(family in name for name in names)]
    assert not missing, names
    binary = source.with_suffix(".fatbin")
    chips = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in CHIPS]
    command = ["nvcc", "-fatbin", "--threads", "2", *chips, "-o", str(binary), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert binary.stat().st_size > len(CHIPS) * 1000 * len(names)
