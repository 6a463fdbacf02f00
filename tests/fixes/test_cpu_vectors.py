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
from engine.targets.cpu.kernels.activations import buffer_names
from engine.targets.cpu.kernels.product import product
from engine.targets.cpu.kernels.thread_pool import part_arguments
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from tests.thorough import rarely, thorough

Q4_K, IQ4_XS = 12, 23
pytestmark = pytest.mark.usefixtures("optimizing_compiler")

X86, ARM = "--target=x86_64-none-unknown-elf", "--target=aarch64-none-unknown-elf"
KINDS = {"values": dtypes.int16, "sums": dtypes.int32}


def source_of(lanes: int, tile: int, kind: int = Q4_K) -> str:
    """The C source of products with a matrix."""
    cpu_vectors.apply()
    layout = LaneLayout(kind, lanes)
    types = [dtypes.float32, dtypes.int32] + [dtypes.int32] * (tile > 1)
    types += [KINDS.get(name, dtypes.float32) for name in buffer_names([layout], tile)]
    types += [dtypes.float32, dtypes.uint16]
    buffers = [UOp.placeholder((1 << 40,), dtype, slot=i + 2) for i, dtype in enumerate(types)]
    program = to_program(product(layout, tile, 8)(*part_arguments(), *buffers), Device["CPU"].renderer)
    return str(next(u for u in program.src if u.op is Ops.SOURCE).arg)


def assembly(source: str, *target: str) -> list[str]:
    flags = ["-S", "-x", "c", "-O2", "-ffreestanding", "-fno-math-errno", "-nostdlib", "-", "-o", "-"]
    command = [os.environ.get("CC", "clang"), *target, *flags]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return [line.split("#")[0] for line in run.stdout.splitlines()]


def test_vectors_reach_the_compiler_whole() -> None:
    source = source_of(16, 1)
    loop = source[source.index("for") :]
    assert "*((float16*)(" in loop
    assert "*((unsigned_short32*)(" in loop
    assert "__builtin_convertvector" in loop
    assert "*((float*)" not in loop and "unsigned short val" not in loop  # nothing is taken apart


@pytest.fixture
def looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources look numbers up, whatever CPU the tests run on."""
    monkeypatch.setattr("engine.targets.cpu.kernels.weight_layout.looks_up", lambda: True)


@pytest.mark.usefixtures("looks_up")
@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize(
    "target, instructions",
    [rarely("icelake-server", ("vpdpwssd", "vpmaddwd")), ("skylake-avx512", ("vpmaddwd",))],
)
def test_pair_products_are_one_instruction_of_512_bits(
    target: str, instructions: tuple[str, ...], tile: int
) -> None:
    lines = assembly(source_of(16, tile, IQ4_XS if tile == 1 else Q4_K), X86, f"-march={target}")
    products = [line for line in lines if any(i in line for i in instructions)]
    assert products and all("zmm" in line for line in products)
    if "vpdpwssd" in instructions and tile > 1:
        assert all("vpdpwssd" in line for line in products)
    assert sum("vpermw" in line and "zmm" in line for line in lines) == (4 if tile == 1 else 0)
    assert not [line for line in lines if "vpmulld" in line or "vpmuludq" in line]


@pytest.mark.usefixtures("looks_up")
@pytest.mark.parametrize("tile", [1, 8])
def test_pair_products_on_narrower_machines(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = assembly(source_of(8, tile, IQ4_XS if tile == 1 else Q4_K), X86, "-march=haswell")
    products = [line for line in lines if "vpmaddwd" in line]
    assert products and all("ymm" in line for line in products)
    assert not [line for line in lines if "vpmulld" in line]
    assert sum("vpshufb" in line for line in lines) == (8 if tile == 1 else 0)
    assert not [line for line in lines if "vpextr" in line]
    monkeypatch.setattr("engine.targets.cpu.kernels.kernel_builder.adds_pairs", lambda: False)
    lines = assembly(source_of(8, tile), ARM, "-mcpu=cortex-a78")
    assert [line for line in lines if "smlal" in line and ".h[" in line]  # by an element
    assert not [line for line in lines if "addp" in line]
    assert not [line for line in lines if "\tmul\tv" in line]  # of 32-bit elements: twice the work


def test_other_versions_of_tinygrad_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.fixes, "installed_version", lambda package: "0.15.0")
    with pytest.raises(BackendError, match=r"0\.15\.0"):
        cpu_vectors.apply()


@thorough
def test_compiler_processes_apply_it_too() -> None:
    script = """
import numpy as np
from tinygrad import dtypes
from engine.fixes import compiler_processes
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from engine.targets.cpu.kernels.product import product, shape_of
if __name__ == "__main__":
    compiler_processes.apply()
    pool, layouts = ThreadPool(1), [LaneLayout(kind, 16) for kind in (0, 1)]
    w = [memory.array(np.ones((64, 16)), layout.dtype) for layout in layouts]
    x, out = memory.array(np.arange(64), dtypes.float32), memory.zeros(16, dtypes.float32)
    shape = memory.array(np.array(shape_of(16, 64, layouts[0], True)), dtypes.int32)
    step = KernelSequence(pool)
    for layout, stream in zip(layouts, w):
        step.add(product(layout, 1, 1), out, shape, x, out, stream)
    step.compile()()
    import tinygrad.engine.worker as worker
    assert worker.worker_pool is not None
    print(memory.view(out).max(), memory.view(out).min())
"""
    environment = os.environ | {"PARALLEL": "2"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["4032.0", "4032.0"], run.stderr
