"""Kernels for GPUs without a GPU: their numbers on an emulator."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from engine.kernels.gpu.packing import Packing, Words
from tests.paths import ROOT
from tests.processes import side_by_side


def python(*args, **env):
    environment = {**os.environ, "PARALLEL": "0", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, *args], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CHECKS = (  # those that take longest first
    "formats",
    "model",
    "prefill_products",
    "attention_on_tensor_cores",
    "embedding",
    "prefill_attention",
    "attention_whole",
    "attention_split",
    "sampling",
    "epilogues",
    "mixtures",
    "profiled_prefill",
    "rule",
)


@pytest.fixture(scope="module")
def running(request):
    run = functools.partial(python, "-m", "tests.kernels.gpu.emulated", DEV="PYTHON::sm_90")
    with side_by_side(request, run, "check") as started:
        yield started


@pytest.mark.parametrize("check", CHECKS)
def test_numbers(running, check):
    running[check,].result()


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_every_bit_of_a_word_belongs_to_one_integer(bits):
    words = Words(bits)
    seen = np.zeros((words.count, 32), int)
    for j in range(words.period):
        pieces = words.place(j)
        assert sum(n for _, _, n, _ in pieces) == bits
        for word, low, n, _ in pieces:
            seen[word, low : low + n] += 1
        assert words.position(j) + bits <= 24  # a float's mantissa
    assert (seen == 1).all()


@pytest.mark.parametrize(
    "ggml_type, limit", [(2, 1), (3, 1), (6, 1), (7, 1), (8, 1), (12, 1.03), (13, 1.03), (14, 1)]
)
def test_packed_bytes_are_the_files(ggml_type, limit):
    packing = Packing(ggml_type)
    stored = 4096 // packing.format.block * packing.format.block_bytes
    assert packing.n_bytes(1, 4096) <= limit * stored
