"""How far pictures are from llama.cpp's exact answers, for every small model that sees beside the checkout:

    python -m tools.measure picture_check BACKEND... [--as sm_87]

A BACKEND is `cpu`, `graph` or `fused`. DEV chooses the device of the last two; by default graph runs on the CPU and
fused on CUDA. The embeddings' differences are parts of their largest number, with encoders in F32, F16 and Q8_0; those
of next tokens are of log-probabilities, of models in F32 with llama.cpp's embeddings. Each is the largest of all
pictures.
"""

import argparse
import os
import tempfile
from pathlib import Path

from tests.paths import SHARED
from tools.measure.engine_process import add_chip, alone, set_up

DEVICES = {"cpu": "CPU", "graph": "CPU", "fused": "CUDA"}


def check(backend: str, models: list[str], chip: str) -> None:
    """Prints a line for each model."""
    device = DEVICES[backend] if backend == "cpu" else os.environ.get("DEV", DEVICES[backend])
    set_up(device, chip if backend == "fused" else "")
    from engine.description.architectures import read_spec
    from engine.formats.gguf import GGUF
    from engine.loading.weights import Weights
    from engine.model.encoder_file import EncoderFile
    from engine.model.open_runner import open_runner
    from engine.protocol.events import KernelPath
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.pictures import PictureRoom
    from tests import vision_oracles

    kernels: KernelPath = "graph" if backend == "graph" else "auto"

    def open(weights: Weights, room: PictureRoom) -> ModelRunner:
        return open_runner(weights, 512, kernels, pictures=room)

    quants = "F32", "F16", "Q8_0"
    print(
        f"{backend:16}" + "".join(f"{quant:>10}" for quant in quants) + "  next tokens  pictures", flush=True
    )
    for name in vision_oracles.MODELS:
        if models and not any(model in name for model in models):
            continue
        with tempfile.TemporaryDirectory() as folder:
            errors = vision_oracles.next_token_errors(SHARED, name, Path(folder), open)
            model, worst = read_spec(GGUF(f"{folder}/m.gguf")), []
            for quant in quants:
                path = Path(folder) / "encoder.gguf"
                vision_oracles.make(SHARED, "make_vision", name, path, "--quant", quant)
                own = vision_oracles.embedding_errors(
                    SHARED, name, EncoderFile(str(path), model).open(kernels)
                )
                worst.append(max(own.values()))
        line = f"{name:16}" + "".join(f"{error:10.1e}" for error in worst)
        print(f"{line}  {max(errors.values()):11.1e}  {len(own):8}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backends", nargs="+", choices=DEVICES, metavar="BACKEND")
    parser.add_argument("--model", action="append", default=[], help="only models with this in their names")
    add_chip(parser)


def run(given: argparse.Namespace) -> None:
    for backend in given.backends:
        alone(check, backend, given.model, given.chip)
