"""How far a quantized KV cache moves the logits of decode steps from those over a float16 cache:

    python -m tests.kv_fidelity MODEL... [--backend cuda] [--kv q8_0] [--depth 4096]

Both runners read the same prompt of `--depth` random tokens and decode the same tokens after it. Printed is the
Kullback-Leibler divergence of the next token's probabilities, in nats: the mean of the steps and the largest; and the
same for the control, the float16 cache whose prompt came in smaller chunks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

STEPS = 32


def divergences(path: str, backend: str, kv: str, depth: int) -> list[str]:
    """A line for the format and for the control. To be called in a process of its own, which the engine sets up as it
    does its worker."""
    from engine.backends import install, prepare
    from engine.events import EngineOptions

    install(prepare(EngineOptions(model_path=path, backend=backend)))
    from engine.formats.gguf import GGUF
    from engine.formats.kv_format import KVFormat
    from engine.model.architectures import read_spec
    from engine.model.open_runner import open_runner
    from engine.model.weights import Weights

    file, draw = GGUF(path), random.Random(0)
    spec = read_spec(file)
    tokens = [draw.randrange(spec.vocab) for _ in range(depth + STEPS)]

    def log_probabilities(format: KVFormat, chunk: int | None = None) -> NDArray[np.float64]:
        runner = open_runner(Weights(file, spec, lambda _: None), depth + STEPS, kv=format)
        chunk = chunk or runner.max_chunk
        for at in range(0, depth, chunk):
            runner.prefill(tokens[at : min(at + chunk, depth)], at)
        steps = []
        for at in range(depth, depth + STEPS):
            runner.decode(tokens[at], at)
            x = runner.logits().astype(np.float64)
            steps.append(x - x.max() - np.log(np.exp(x - x.max()).sum()))
        return np.array(steps)

    wanted = log_probabilities(KVFormat.F16)
    found = {kv: log_probabilities(KVFormat.parse(kv)), "control": log_probabilities(KVFormat.F16, 32)}
    lines = []
    for name, logs in found.items():
        of_steps = (np.exp(wanted) * (wanted - logs)).sum(-1)
        same = np.mean(wanted.argmax(-1) == logs.argmax(-1))
        lines.append(
            f"{name}: mean {of_steps.mean():.1e}, largest {of_steps.max():.1e}, {same:.0%} same token"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--kv", default="q8_0")
    parser.add_argument("--depth", type=int, default=4096)
    given = parser.parse_args()
    for path in given.models:
        print(Path(path).stem, flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            for line in own.submit(divergences, path, given.backend, given.kv, given.depth).result():
                print("  " + line, flush=True)


if __name__ == "__main__":
    main()
