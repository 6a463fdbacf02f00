"""Runs checks of GPU kernels and prints a line for each, in JSON: {"check": name, "error": traceback or "", "seconds":
its time}.

    DEV=... python -m tests.kernels.gpu.run_checks MODULE.CHECK...

DEV=TEGRA+NV is compiled C on the simulated board, with the warps of a block in both orders. DEV=PYTHON::sm_90 is
tinygrad's emulator, which needs no compiler.

One process runs them all: they share the kernels that pack matrices. It is none of pytest's, since a process has one
default device.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from tinygrad import Device

from engine.fixes import slice_shapes

MODELS = ("check_batches", "check_layers", "check_model")


@contextlib.contextmanager
def simulated_board() -> Iterator[None]:
    """Raises AssertionError where the simulated GPU has met a fault, or where memory is left."""
    from engine.kernels.gpu.device import multiprocessors
    from engine.tegra import device
    from tests.driver.kernel import MULTIPROCESSORS
    from tests.driver.simulate import simulated

    device.install()
    with simulated() as kernel:
        assert multiprocessors() == MULTIPROCESSORS
        yield
        fault = kernel.gpus[0].fault
        Device["NV"].finalize()
        assert not fault and not kernel.leaks()


def orders_of_warps(of_models: bool) -> Iterator[None]:
    """Once with the first warp of a block ahead of the others, once with the last. Whole models, whose kernels other
    checks have run alone, run with the last one only, unless ORIN_THOROUGH is set."""
    from tests.driver import program

    for program.backwards in (True,) if of_models and not os.environ.get("ORIN_THOROUGH") else (False, True):
        yield


def run(check: Callable[[], None], is_on_board: bool) -> str:
    """The traceback of a check that fails, "" where it does not."""
    from tests.kernels.gpu.buffers import begin

    try:
        of_models = check.__module__.rpartition(".")[2] in MODELS
        for _ in orders_of_warps(of_models) if is_on_board else [None]:
            begin()
            check()
    except Exception:
        return traceback.format_exc()
    return ""


def main(*names: str) -> None:
    gc.disable()  # a fifth of the time that kernels take to compile
    slice_shapes.apply()
    is_on_board = os.environ["DEV"].endswith("NV")
    with simulated_board() if is_on_board else contextlib.nullcontext():
        for name in names:
            module, _, function = name.partition(".")
            check = getattr(importlib.import_module(f"tests.kernels.gpu.{module}"), function)
            started = time.perf_counter()
            result = {"check": function, "error": run(check, is_on_board)}
            print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
