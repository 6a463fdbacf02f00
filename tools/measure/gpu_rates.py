"""What a GPU's rates are, how long it takes to measure them, and which tiles and schedules follow from them.

    python -m tools.measure gpu_rates [--backend cuda]

On a GPU it measures (`engine.targets.nvidia.calibration`) three times, and compares the choices by these rates with
those by what the driver tells. Without one it shows the choices for GPUs of 8 to 132 multiprocessors, whose rates are
guessed from published numbers.
"""

from __future__ import annotations

import argparse
import time

from tinygrad.helpers import Context

from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.products.prompt_products import prompt_order, prompt_tiles
from engine.targets.nvidia.kernels.products.schedule_cost import microseconds
from engine.targets.nvidia.kernels.products.schedules import matvec_schedule
from engine.targets.nvidia.kernels.products.small_batch import small_batch_tiles
from engine.targets.nvidia.kernels.products.stacked_matrices import StackedMatrices
from engine.targets.nvidia.kernels.rates import H200, Rates
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from tools.measure.engine_process import alone, set_up

GUESSED = {
    "Orin Nano": Chip("sm_87", 8, 48, own_rates=Rates(55, 2.5, 0.6, 24, 1.3)),
    "AGX Orin": Chip("sm_87", 16, 48, own_rates=Rates(165, 2.5, 0.6, 51, 2.6)),
    "RTX 3060": Chip("sm_86", 28, 48, own_rates=Rates(320, 1.6, 0.45, 69, 0.9)),
    "RTX 3080": Chip("sm_86", 68, 48, own_rates=Rates(680, 1.6, 0.45, 67, 0.87)),
    "H100 PCIe": Chip("sm_90", 114, 64, True, Rates(1700, 0.9, 0.42, 68, 3.3), True),
    "RTX 4090": Chip("sm_89", 128, 48, own_rates=Rates(930, 1.4, 0.45, 98, 1.3)),
    "H200": Chip("sm_90", 132, 64, True, H200, True),
}
"""GPUs and their rates, guessed: bandwidths and clocks as published, launches and latencies as others measured them."""

SHAPES = ((4096, 4096), (2560, 9728), (6144, 1152), (1152, 6912), (28672, 4096), (151936, 2560))
"""Rows and columns: of no model that is tuned but for the first."""

_TYPES = (12, 14, 8)  # Q4_K, Q6_K, Q8_0


def choices(chip: Chip) -> dict[str, str]:
    """What is chosen for products of one token, eight and 512, by their names."""
    found = {}
    for rows, cols in SHAPES:
        for kind in _TYPES:
            layout = WeightLayout(kind)
            stack = StackedMatrices.single(layout, rows, cols)
            s = matvec_schedule(stack, chip)
            us = microseconds(stack, s, chip)
            found[f"{stack.name}, a token"] = f"{s.name} {us:.1f} us by the model"
            few = small_batch_tiles(layout, 8, rows, cols, chip, True)
            found[f"{stack.name}, 8 tokens"] = (
                f"{few.rows}x{few.across}, {few.parts} warps, {few.splits} blocks"
            )
            for tokens in (128, 512):
                order = prompt_order([(layout, rows, cols)], tokens, chip)
                many = prompt_tiles(layout, tokens, rows, cols, chip, False, order)
                found[f"{stack.name}, {tokens} tokens"] = f"{many.width} rows, {many.parts} parts"
    return found


def measure(backend: str) -> None:
    """Prints the rates of the default GPU. To be called in a process of its own."""
    set_up(backend)
    from dataclasses import replace

    from engine.targets.nvidia import calibration
    from engine.targets.nvidia.kernels import device

    told = device.chip()
    print(f"the driver tells: {told.rates}" if told.own_rates else "nothing is known")
    for _ in range(3):
        started_s = time.perf_counter()
        rates = calibration.measured(told)
        print(f"measured in {time.perf_counter() - started_s:.2f} s: {rates}")
    before, after = choices(told), choices(replace(told, own_rates=rates))
    changed = [name for name in before if before[name].split(" ")[0] != after[name].split(" ")[0]]
    print(f"{len(changed)} of {len(before)} choices are others by what was measured:")
    for name in changed:
        print(f"  {name}: {before[name]} -> {after[name]}")


def guessed(gpu: str) -> dict[str, str]:
    """The choices for a GPU without one, as tinygrad would render its kernels."""
    with Context(DEV=f"NULL:NVCC:{GUESSED[gpu].capability}"):
        return choices(GUESSED[gpu])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="", help="that of a GPU here, as cuda")


def run(given: argparse.Namespace) -> None:
    if given.backend:
        alone(measure, given.backend)
        return
    found = {gpu: guessed(gpu) for gpu in GUESSED}
    print("| product | " + " | ".join(found) + " |")
    print("|" + "---|" * (1 + len(found)))
    for name in found["H200"]:
        print(f"| {name} | " + " | ".join(of[name] for of in found.values()) + " |")
