"""Whole vectors on the CPU: what the compiler is given, and what it makes of it."""

import os
import subprocess
import sys

import pytest
from tinygrad import Device, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.uop.ops import Ops

import engine.fixes
from engine.errors import BackendError
from engine.fixes import cpu_vectors
from engine.formats.quantization import QUANTIZED
from engine.kernels.lanes import lane_product

ROWS, COLS, Q4_K = 64, 512, QUANTIZED[12]


@pytest.fixture(scope="module")
def source() -> str:
    """The C source of a product of one token with a Q4_K matrix."""
    cpu_vectors.apply()
    n = ROWS * COLS
    arguments = [
        (ROWS, dtypes.float32),
        (COLS, dtypes.float32),
        (COLS // 32, dtypes.float32),
        (n // 2, dtypes.uint8),
    ]
    arguments += [(n // 256, dtypes.float16), (n // 32, dtypes.uint8)] * 2
    buffers = [UOp.placeholder((size,), dtype, slot=i) for i, (size, dtype) in enumerate(arguments)]
    sink = lane_product(Q4_K, 1, ROWS, COLS, 16)(*buffers)
    program = to_program(sink, Device["CPU"].renderer)
    return str(next(u for u in program.src if u.op is Ops.SOURCE).arg)


def assembly(source: str, *target: str) -> str:
    compiler = os.environ.get("CC", "clang")
    flags = ["-S", "-x", "c", "-O2", "-ffreestanding", "-fno-math-errno", "-nostdlib", "-", "-o", "-"]
    return subprocess.run(
        [compiler, *target, *flags], input=source, capture_output=True, text=True, check=True
    ).stdout


def test_vectors_reach_the_compiler_whole(source: str) -> None:
    loop = source[source.index("for") :]
    assert "*((float16*)(" in loop
    assert "__builtin_convertvector" in loop
    assert "*((unsigned_char16*)(" in loop
    assert "__fp16*)" not in loop.replace("__fp1616*)", "")  # no scale is loaded alone


@pytest.mark.parametrize(
    "target, multiply_add",
    [
        (("--target=x86_64-none-unknown-elf", "-march=skylake-avx512"), "zmm"),
        (("--target=x86_64-none-unknown-elf", "-march=haswell"), "ymm"),
        (("--target=aarch64-none-unknown-elf", "-mcpu=cortex-a78ae"), ".4s"),
    ],
    ids=["AVX-512", "AVX2", "NEON"],
)
def test_multiply_adds_fill_the_registers(source: str, target: tuple[str, ...], multiply_add: str) -> None:
    instructions = [line.split("#")[0] for line in assembly(source, *target).splitlines()]
    adds = [line for line in instructions if "vfmadd" in line or "fmla" in line]
    assert adds
    assert all(multiply_add in line for line in adds)


def test_other_versions_of_tinygrad_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.fixes, "version", lambda package: "0.15.0")
    with pytest.raises(BackendError, match=r"0\.15\.0"):
        cpu_vectors.apply()


def test_compiler_processes_apply_it_too() -> None:
    script = """
from engine.fixes import cpu_vectors; cpu_vectors.apply()
from tinygrad import Tensor
from engine.kernels.lanes import lane_product
if __name__ == "__main__":
    ws = [Tensor.ones(1, c, 16).contiguous().realize() for c in (64, 128)]
    xs = [Tensor.arange(c).float().contiguous().realize() for c in (64, 128)]
    outs = [Tensor.custom_kernel(Tensor.empty(1, 16), x, w, fxn=lane_product(None, 1, 16, c, 16))[0]
            for c, x, w in zip((64, 128), xs, ws)]
    Tensor.realize(*outs)
    import tinygrad.engine.worker as worker
    assert worker.worker_pool is not None
    print(*[o.numpy().max() for o in outs])
"""
    environment = os.environ | {"PARALLEL": "2"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["2016.0", "8128.0"], run.stderr
