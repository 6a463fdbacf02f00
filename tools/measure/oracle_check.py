"""How far the engine is from llama.cpp's exact answers, for every small model beside the checkout (`tests.oracles`).

    python -m tools.measure oracle_check BACKEND... [--as sm_87]

A BACKEND is `reference` (numpy), `cpu`, `graph` or `fused`. DEV chooses the device of the last two; by default graph
runs on the CPU and fused on CUDA. With --as, a GPU runs on `fused` what one of that compute capability would run.
"""

import argparse
import os
import tempfile
from pathlib import Path

from tests.paths import SHARED
from tools.measure.engine_process import add_chip, alone, set_up

DEVICES = {"reference": "CPU", "cpu": "CPU", "graph": "CPU", "fused": "CUDA"}


def check(backend: str, models: list[str], chip: str) -> None:
    """Prints a line for each model and prompt."""
    device = DEVICES[backend] if backend == "cpu" else os.environ.get("DEV", DEVICES[backend])
    set_up(device, chip if backend == "fused" else "")
    from engine.errors import ModelFileError
    from engine.loading.weights import Weights
    from engine.model.open_runner import open_runner
    from engine.runtime.model_runner import ModelRunner
    from tests import oracles

    def open(weights: Weights, context: int) -> ModelRunner:
        return open_runner(weights, context, "graph" if backend == "graph" else "auto")

    print(f"{backend:24} prompt  difference  divergence  wrong tokens", flush=True)
    for name in oracles.NAMES:
        if models and not any(model in name for model in models):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            oracles.make(SHARED, name, path)
            for number, prompt in enumerate(oracles.prompts(SHARED, name)):
                try:
                    answers = (
                        oracles.of_reference(path, prompt)
                        if backend == "reference"
                        else oracles.of_runner(open, path, prompt)
                    )
                except ModelFileError as error:
                    print(f"{name:24} {number:6}  {error}", flush=True)
                    continue
                a = oracles.agreement(prompt, answers)
                print(
                    f"{name:24} {number:6}  {a.difference:10.1e}  {a.divergence:10.1e}  {a.wrong:12}",
                    flush=True,
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backends", nargs="+", choices=DEVICES, metavar="BACKEND")
    parser.add_argument("--model", action="append", default=[], help="only models with this in their names")
    add_chip(parser)


def run(given: argparse.Namespace) -> None:
    for backend in given.backends:
        alone(check, backend, given.model, given.chip)
