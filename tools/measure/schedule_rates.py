"""Schedules of a model's products within its decode steps on a GPU, and what each kernel of a step adds to it:

    python -m tools.measure schedule_rates MODEL... [--backend cuda] [--count 20] [--seconds 60] [--only " of "]

A comment for each kind of kernel says how much less time a step takes without it: beside its neighbours a kernel takes
another time than alone. Then a line for each schedule of a product, in the form of
tests/kernels/gpu/h200_schedules.csv: step MODEL, product, threads, groups, rows, early, microseconds of a step; the
first of a product is the one in use. A few layers of a model do: each shape counts once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tools.measure.engine_process import add_models, alone, set_up

CONTEXT, MIN_BYTES = 512, 1 << 20


def measure(path: str, backend: str, count: int, seconds: float, only: str) -> None:
    """Prints the lines of a model. To be called in a process of its own."""
    set_up(backend)
    from engine.description.architectures import read_spec
    from engine.formats.gguf import GGUF
    from engine.kernels.compilation import compile_all
    from engine.loading.weights import Weights
    from engine.targets.nvidia.kernels.device import chip
    from engine.targets.nvidia.kernels.products.schedules import candidates
    from engine.targets.nvidia.kernels.products.stacked_matrices import StackedMatrices
    from engine.targets.nvidia.matrices import Product
    from engine.targets.nvidia.runner import NvidiaRunner

    began, file = time.monotonic(), GGUF(path)
    runner = NvidiaRunner(Weights(file, read_spec(file), lambda _: None), CONTEXT)
    target = runner.search_target()

    whole = target.build_step()
    names = [call.src[0].arg.name for call in whole.compile().src]
    all_us = 1e6 * target.step_seconds(whole.capture())
    print(f"# {Path(path).stem}: {len(names)} kernels, {all_us:.1f} us a step", flush=True)
    for name in dict.fromkeys(names):
        without = target.build_step()
        without.calls = [call for call, own in zip(without.calls, names, strict=True) if own != name]
        saved = all_us - 1e6 * target.step_seconds(without.capture())
        print(f"# {name}: {names.count(name)} of them, {saved / names.count(name):.2f} us each", flush=True)

    shapes: dict[StackedMatrices, list[Product]] = {}
    for product in target.products:
        shapes.setdefault(product.stack, []).append(product)
    tried = []
    for stack, products in shapes.items():
        if only not in stack.name or len(products) * stack.n_bytes < MIN_BYTES:
            continue
        used = products[0].schedule
        for schedule in [used, *candidates(stack, used, chip())[:count]]:
            for product in products:
                product.schedule = schedule
            tried.append((stack.name, schedule, target.build_step()))
        for product in products:
            product.schedule = used
    compile_all([step.linear for _, _, step in tried])
    print(f"# {len(tried)} schedules compiled after {time.monotonic() - began:.0f} s", flush=True)
    timed_from = time.monotonic()
    for i, (name, s, step) in enumerate(tried):
        if time.monotonic() - timed_from > seconds:
            print(f"# {len(tried) - i} more were not timed")
            break
        us = 1e6 * target.step_seconds(step.capture())
        blocks = f",{s.blocks} held" if s.blocks else ""
        print(
            f"step {Path(path).stem},{name},{s.threads},{s.groups},{s.rows},{int(s.early)},{us:.1f}{blocks}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--count", type=int, default=20, help="schedules of a product, beside the one in use")
    parser.add_argument(
        "--seconds", type=float, default=60, help="after which no other is timed, of each model"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="products with this in their names")


def run(given: argparse.Namespace) -> None:
    for path in given.models:
        alone(measure, path, given.backend, given.count, given.seconds, given.only)
