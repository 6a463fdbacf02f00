"""Kernels compiled for a chip that is not here."""

from pathlib import Path

import pytest

from engine.errors import BackendError
from tests.thorough import thorough
from tools.measure.chip_compiler import LIMITS, RuntimeCompiler, Use, read_log, runtime_compilers
from tools.measure.chip_kernels import fault, report, run, texts, uses_of, usual_models
from tools.measure.simulated_gpu import KernelText

SAID = """\
ptxas info    : Compiling entry function '_ZN2k110E_2176_32_4EPf' for 'sm_87'
ptxas info    : Function properties for _ZN2k110E_2176_32_4EPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 6 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN2k04headEPf' for 'sm_87'
ptxas info    : Function properties for _ZN2k04headEPf
ptxas         .     88 bytes stack frame, 128 bytes spill stores, 124 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8576 bytes smem, 360 bytes cmem[0]
"""


def test_what_the_assembler_says_is_read():
    assert read_log(SAID, 2) == [Use(255, 128, 8576), Use(6, 0, 0)]
    with pytest.raises(BackendError, match="2 kernels of 3"):
        read_log(SAID, 3)


def test_blocks_that_fit_on_an_orins_multiprocessor():
    orin = LIMITS["sm_87"]
    assert Use(32, 0, 0).resident(1024, 0, orin) == 1, "1536 threads"
    assert Use(32, 0, 0).resident(32, 0, orin) == 16
    assert Use(255, 0, 0).resident(128, 0, orin) == 2, "65536 registers"
    assert Use(32, 0, 40 << 10).resident(64, 0, orin) == 4, "164 KB of shared memory"
    assert Use(32, 0, 0).resident(64, 99 << 10, orin) == 1


def test_what_does_not_do_is_said():
    def why(use: Use, source: str = "", least: int = 0) -> str:
        return fault(KernelText("k", source, 256, 0, least), use, "sm_87")

    assert why(Use(64, 0, 0)) == ""
    assert why(Use(64, 16, 0)) == "spills 16 bytes"
    assert "shared memory" in why(Use(64, 0, 49 << 10))
    assert "does not fit" in why(Use(300, 0, 0))
    assert "later chips" in why(Use(64, 0, 0), 'asm volatile("griddepcontrol.wait;")')
    assert why(Use(128, 0, 0), least=3) == "2 blocks fit, not 3"


def test_no_kernel_is_compiled_beside_headers_of_another_one():
    """Else it could name a type that it does not know alone."""
    half, plain = "#include <cuda_fp16.h>\nhalf a;", "half *b;"
    group = "#include <cuda_fp16.h>\nwgmma.fence"  # of one chip only
    kernels = [KernelText("k", source, 32, 0, 0) for source in [half, plain] * 30 + [group]]
    found = [[*{k.source for k in text}] for text in texts(kernels)]
    assert found == [[plain]] * 2 + [[half]] * 2 + [[group]]


def test_why_a_kernel_is_not_compiled_is_said_of_that_kernel(monkeypatch):
    def uses(_, sources, chip):
        if bad := [source for source in sources if "make_float(" in source]:
            raise BackendError(f"{bad[0]} is not compiled for {chip}.")
        return [Use(1, 0, 0)] * len(sources)

    monkeypatch.setattr(RuntimeCompiler, "__init__", lambda self, path: None)
    monkeypatch.setattr(RuntimeCompiler, "uses", uses)
    kernels = [KernelText("k", source, 32, 0, 0) for source in ("a", "make_float(a)", "b")]
    found = uses_of(Path(), kernels, "sm_90")
    assert found == [Use(1, 0, 0), "make_float(a) is not compiled for sm_90.", Use(1, 0, 0)]
    assert report("NVRTC", kernels, found, "sm_90", verbose=False) == [f"k: {found[1]}"]


@thorough
@pytest.mark.skipif(not runtime_compilers(), reason="there is no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("name", usual_models())
def test_no_kernel_of_an_orin_spills(name, capsys):
    import argparse

    from tools.measure.chip_kernels import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args(["--only", name, "--processes", "1"]))  # it ends with 1 where a kernel does not do
    assert "kernels in all" in capsys.readouterr().out
