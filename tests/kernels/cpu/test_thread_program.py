"""The program of the pool's threads, compiled for Arm: its memory model gives no order that is not asked for."""

import os
import re
import subprocess

import pytest
from tinygrad import Device
from tinygrad.codegen import to_program
from tinygrad.uop.ops import KernelInfo, Ops

from engine.targets.cpu.kernels.thread_program import thread_program


@pytest.fixture(scope="module")
def source() -> str:
    sink = thread_program(2).sink(arg=KernelInfo("thread_program"), tag=1)
    program = to_program(sink, Device["CPU"].renderer)
    return str(next(u for u in program.src if u.op is Ops.SOURCE).arg)


def test_fences_are_around_kernels_and_before_sleep(source: str) -> None:
    """In this order: a piece is seen to be free to start, FENCE, the kernel, FENCE, it is counted, FENCE, who sleeps
    is looked at. And whoever is going to sleep says so, FENCE, looks once more."""
    words = {
        "fence": r"__atomic_thread_fence\(__ATOMIC_SEQ_CST\)",
        "add": r"= __atomic_fetch_add\(\(data1_\d+\+(0|8)ul\), .*__ATOMIC_SEQ_CST\)",
        "kernel": r"\(void\(\*\)\(unsigned long, unsigned long,",
        "say": r"\*\(data2_\d+\+alu\d+\) = \(\(unsigned long\)",
        "look": r"= \(\*\(data1_\d+\+(0|8)\)\)",
        "sleeps": r"= __atomic_exchange_n\(\(data2_\d+\+alu\d+\), 0ul, __ATOMIC_SEQ_CST\)",
    }
    found = [
        (match.start(), name) for name, pattern in words.items() for match in re.finditer(pattern, source)
    ]
    order = " ".join(name for _, name in sorted(found))
    assert re.search(r"\bsay fence look\b", order), order
    assert re.search(r"\badd (look )*fence kernel fence add fence sleeps\b", order), order


@pytest.mark.parametrize("core", ["cortex-a53", "cortex-a78"])
def test_arm_gets_barriers_and_atomics_of_its_own(source: str, core: str) -> None:
    """Without and with instructions that add to memory; none is left to a library that is not there."""
    flags = ["-S", "-x", "c", "-O2", "-ffreestanding", "-nostdlib", "-", "-o", "-"]
    command = [os.environ.get("CC", "clang"), "--target=aarch64-none-unknown-elf", f"-mcpu={core}", *flags]
    lines = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    code = [line.split()[0] for line in lines.splitlines() if line.startswith("\t") and line.split()]
    assert code.count("dmb") >= 5
    assert any(re.match("ldaddal" if core == "cortex-a78" else "stlxr", word) for word in code)
    assert "bl" not in code, "calls go to addresses in registers alone"
