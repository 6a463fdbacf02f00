"""Kernels for GPUs without a GPU: their numbers on an emulator, and that they compile for the chips we name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.kernels.packing import Packing, Words

ROOT = Path(__file__).resolve().parents[2]


def python(*args, **env):
    environment = {**os.environ, "PARALLEL": "0", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, *args], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "check",
    [
        "formats",
        "epilogues",
        "embedding",
        "attention_whole",
        "attention_split",
        "prefill_products",
        "prefill_attention",
        "sampling",
        "rule",
        "model",
    ],
)
def test_numbers(check):
    python("-m", "tests.kernels.emulated", check, DEV="PYTHON::sm_90")


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


COMPILE = """
from tinygrad import Device, UOp, dtypes
from tinygrad.codegen import to_program
from engine.kernels.attention import Heads, Split, attention
from engine.kernels.matmul import fragments_size, matmul, tiles_for
from engine.kernels.matvec import GateUp, matvec
from engine.kernels.packing import Packing, permuted_size
from engine.kernels.prompt import attend_prompt
from engine.kernels.schedules import matvec_schedule
f, h, i = dtypes.float32, dtypes.float16, dtypes.int32
def compiles(kernel, *buffers):
    placeholders = [UOp.placeholder((n,), dtype, slot=k) for k, (n, dtype) in enumerate(buffers)]
    program = to_program(kernel(*placeholders), Device[Device.DEFAULT].renderer)
    print(program.arg.name, len(program.src[3].arg))
for ggml_type in (8, 13, 14):
    p, rows, cols = Packing(ggml_type), 512, 2048
    s = matvec_schedule(p, rows, cols)
    kernel = matvec(p, rows, cols, s, GateUp(), "t", 64, 1e-5)
    compiles(kernel, (rows // 2, f), (permuted_size(cols), f), (64, f), (64, f), *p.shapes(rows, cols))
heads = Heads(16, 8, 128, 9216, 1e-6)
cache = (heads.cache_size, h)
new = ((4096, f), (128, f), (2, i), (256, f), (64, f))
compiles(attention(heads, Split(256, 1, 1, 256), False), (2048, f), cache, cache, *new)
p, rows, cols = Packing(12), 512, 2048
tiles = tiles_for(64, rows, cols, 16, True)
kernel = matmul(p, 64, rows, cols, tiles, True, "t")
compiles(kernel, (fragments_size(64, rows // 2), h), (fragments_size(64, cols), h), (2, i), *p.shapes(rows, cols))
compiles(attend_prompt(heads, 64), (fragments_size(64, 2048), h), (64 * 2048, h), cache, cache, (2, i))
"""


@pytest.mark.skipif(not shutil.which("nvcc"), reason="CUDA's compiler is not installed")
@pytest.mark.parametrize("chip", ["sm_87"])
def test_compiles_for(chip):
    out = python("-c", COMPILE, DEV=f"NULL:NVCC:{chip}", ALLOW_HALF8="1")
    assert len(out.splitlines()) == 6 and all(int(line.split()[-1]) > 1000 for line in out.splitlines())
