"""Runs checks of GPU kernels and prints a line for each, in JSON: {"check": name, "error": traceback or "", "seconds":
its time}.

    DEV=... PARALLEL=0 python -m tests.kernels.gpu.run_checks MODULE.CHECK...

DEV=CUDA is a real GPU. DEV=TEGRA+NV is compiled C on the simulated board, the last warp of a block ahead of the others;
with ORIN_THOROUGH, the first one too. DEV=PYTHON::sm_90 is tinygrad's emulator, which needs no compiler. Of each kernel
that is compiled, vector loads and stores are proven to be aligned.

One process runs them all: they share the kernels that pack matrices. It is none of pytest's, since a process has one
default device.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinygrad import Device, UOp, codegen

from engine.backends import install
from engine.fixes import graph_nodes, graph_rewrites, index_lowering, program_cache, slice_shapes
from engine.kernels import compilation
from tests.kernels.gpu.alignment import prove_uops
from tests.tier import THOROUGH

if TYPE_CHECKING:
    from engine.targets.nvidia.kernels.device import Chip
    from engine.targets.nvidia.kernels.products.matmul import Tiles
    from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout


@contextlib.contextmanager
def simulated_board() -> Iterator[None]:
    """Raises AssertionError where the simulated GPU has met a fault, or where memory is left."""
    from engine.targets.nvidia.kernels.device import multiprocessors
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


def orders_of_warps() -> Iterator[None]:
    """Once with the last warp of a block ahead of the others; with ORIN_THOROUGH, once more with the first."""
    from tests.driver import program

    for program.backwards in (True, False) if THOROUGH else (True,):
        yield


def prove_alignment() -> None:
    """From now on, a kernel of the GPU whose vector accesses are not known to be aligned raises
    AssertionError."""
    stock = codegen.do_to_program

    def proven(*arguments: Any) -> UOp:
        program = stock(*arguments)
        if arguments[1].target.device != "CPU":
            prove_uops(program)
        return program

    codegen.do_to_program = proven


def compile_what_runs() -> None:
    """From now on, a kernel is compiled when a step that has it is launched: runners compile at once what answers of
    any length may need, of which a check runs a part, and capture a first step while weights travel. With
    ORIN_THOROUGH, and in `tests/driver/test_decode.py`, they do."""
    compilation.begin_once = lambda description, *makes: lambda: None
    from engine.targets.nvidia.runner import NvidiaRunner  # which takes it

    NvidiaRunner._capture_while = lambda runner, filling: None


def lower_tiles() -> None:
    """From now on, products of prompts and pictures have tiles of 32 tokens, which are a third of the work to compile.
    Those of a prompt's gate and up have the tiles of users, and with ORIN_THOROUGH all have. A prompt's attention reads
    the fewest keys in a step; `check_prompt_attention` has more."""
    from engine.targets.nvidia import picture_kernels, picture_steps
    from engine.targets.nvidia.kernels.products import prompt_products
    from engine.targets.nvidia.sublayers import attention

    stock, stock_tiling = prompt_products.tiles_for, attention.prompt_tiling

    def lower(layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool) -> Tiles:
        tiles = stock(layout, tokens, rows, cols, chip, paired)
        return replace(tiles, rows=min(2, tiles.rows))

    def for_prompts(
        layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool
    ) -> Tiles:
        return (stock if paired else lower)(layout, tokens, rows, cols, chip, paired)

    picture_kernels.tiles_for = picture_steps.tiles_for = lower
    prompt_products.tiles_for = for_prompts
    attention.prompt_tiling = lambda *step: replace(stock_tiling(*step), steps=1)


def run(check: Callable[[], None], is_on_board: bool) -> str:
    """The traceback of a check that fails, "" where it does not."""
    from tests.kernels.gpu.buffers import begin

    try:
        for _ in orders_of_warps() if is_on_board else [None]:
            begin()
            check()
    except Exception:
        return traceback.format_exc()
    return ""


def main(*names: str) -> None:
    gc.disable()  # a fifth of the time that kernels take to compile
    graph_nodes.apply()
    graph_rewrites.apply()
    index_lowering.apply()
    slice_shapes.apply()
    program_cache.apply()
    prove_alignment()
    if not THOROUGH:
        compile_what_runs()
    if os.environ["DEV"] == "CUDA":  # kernels compile there as the engine's do
        install("CUDA")
    is_on_board = os.environ["DEV"].endswith("NV")
    with simulated_board() if is_on_board else contextlib.nullcontext():
        if not THOROUGH:
            lower_tiles()
        for name in names:
            module, _, function = name.partition(".")
            check = getattr(importlib.import_module(f"tests.kernels.gpu.{module}"), function)
            started = time.perf_counter()
            result = {"check": function, "error": run(check, is_on_board)}
            print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
