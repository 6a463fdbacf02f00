"""The source of all kernels for NVIDIA GPUs: addresses of vector loads and stores are aligned, and CUDA's own compiler
takes it for every chip that we name; so is tinygrad's own PTX. No GPU is needed. By default `run_checks` proves the
same of CUDA C, before it is text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.gpu.alignment import prove_ptx
from tests.paths import ROOT
from tests.thorough import thorough

pytestmark = thorough
TYPES = ["Q6_K", "Q5_1", "Q4_K", "Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q5_K", "F16", "BF16", "F32"]
CHIPS = {87: "Jetson AGX Orin", 89: "GeForce RTX 40", 90: "H100, H200"}
FAMILIES = (
    "embed", "qkv", "attention", "combine", "o_", "gate_up", "down", "head", "next_token", "biased", "mixed",
    "activate", "penalize", "leaders", "ranked", "draw",
    "prefill_embed", "prefill_norm", "prefill_qkv", "prefill_rotate", "prefill_attend", "prefill_combine", "prefill_o",
    "prefill_gate_up", "prefill_down", "prefill_activate", "add_normed", "96_window",
    "prefill_router", "prefill_choose", "prefill_count", "prefill_sort", "prefill_experts_gate_up",
    "prefill_experts_down", "prefill_wide_norms", "_4_of_32", "few_t", "_pool_40_",
)  # fmt: skip
nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="CUDA's compiler is not installed")


def python(renderer: str, *arguments: str) -> str:
    """What a process prints whose default device renders as for an Orin, and runs nothing."""
    env = {"DEV": f"NULL:{renderer}:sm_87", "NULL_ALLOW_COPYOUT": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Path]]:
    """The sources of a path's kernels, a file a type, by path and renderer; each is rendered once."""
    made: dict[tuple[str, str], list[Path]] = {}

    def render(path: str, renderer: str) -> list[Path]:
        if (path, renderer) not in made:
            folder = tmp_path_factory.mktemp("rendered")
            said = python(renderer, "-m", "tests.kernels.gpu.rendered", path, str(folder), *TYPES)
            counts = [line.split() for line in said.splitlines()]
            assert [quant for quant, *_ in counts] == TYPES
            assert all(int(kernels) > 20 and int(vectors) > 80 for _, kernels, vectors in counts), said
            made[path, renderer] = [folder / quant for quant in TYPES]
        return made[path, renderer]

    return render


def compiled(source: Path, chips: list[int]) -> tuple[str, Path]:
    """The PTX that CUDA's compiler makes of CUDA C, and a binary for `chips`. Raises AssertionError."""
    folder = source.with_suffix(".compiled")
    folder.mkdir()
    binary = folder / "kernels.fatbin"
    codes = ",".join(["compute_87", *(f"sm_{chip}" for chip in chips)])
    command = [
        "nvcc",
        "-x",
        "cu",
        "-fatbin",
        "--threads",
        "2",
        f"-gencode=arch=compute_87,code=[{codes}]",
        "--keep",
    ]
    command += ["--keep-dir", str(folder), "-o", str(binary), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(folder.glob("*.ptx")).read_text(), binary


def wide_accesses(ptx: str) -> list[int]:
    """How many accesses of 8 bytes or more each kernel has, all of them proven to be aligned."""
    return [prove_ptx(kernel) for kernel in ptx.split(".entry")[1:]]


@pytest.mark.parametrize("renderer", ["NVCC", "PTX"])
@pytest.mark.parametrize("path", ["fused", "graph"])
def test_vector_accesses_are_aligned(
    sources: Callable[[str, str], list[Path]], path: str, renderer: str
) -> None:
    for source in sources(path, renderer):
        if renderer == "PTX":
            assert sum(wide_accesses(source.read_text())) > 80


@nvcc
@pytest.mark.parametrize("path", ["fused", "graph"])
def test_what_cudas_compiler_makes_of_them_is_aligned_and_runs_on_every_chip(
    sources: Callable[[str, str], list[Path]], path: str
) -> None:
    for source in sources(path, "NVCC"):
        names = re.findall(r"__launch_bounds__\([^)]*\) (\w+)\(", source.read_text())
        ptx, binary = compiled(source, list(CHIPS) if path == "fused" else [])
        assert len(wide_accesses(ptx)) == len(names) and sum(wide_accesses(ptx)) > 100
        if path == "fused":
            missing = [family for family in FAMILIES if not any(family in name for name in names)]
            assert not missing or source.name != TYPES[0], names
            assert binary.stat().st_size > len(CHIPS) * 1000 * len(names)
