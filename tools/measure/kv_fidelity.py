"""How far a quantized KV cache moves the logits of decode steps from those over a float16 cache:

    python -m tools.measure kv_fidelity MODEL... [--backend cuda] [--kv q8_0] [--depth 4096]

Both runners read the same prompt of `--depth` random tokens and decode the same tokens after it. Printed is the
Kullback-Leibler divergence of the next token's probabilities, in nats: the mean of the steps and the largest; and the
same for the control, the float16 cache whose prompt came in smaller chunks.
"""

import argparse
import random
from pathlib import Path

import numpy as np

from engine.formats.kv_format import KVFormat
from tools.measure.engine_process import add_models, alone, log_probabilities, runners

STEPS = 32


def divergences(path: str, backend: str, kv: str, depth: int) -> list[str]:
    """A line for the format and for the control. To be called in a process of its own."""
    open_runner, vocab = runners(path, backend)
    draw = random.Random(0)
    tokens = [draw.randrange(vocab) for _ in range(depth + STEPS)]
    wanted, found, control = (
        log_probabilities(open_runner(depth + STEPS, kv=format), tokens, depth, chunk)
        for format, chunk in ((KVFormat.F16, None), (KVFormat.parse(kv), None), (KVFormat.F16, 32))
    )
    lines = []
    for name, logs in ((kv, found), ("control", control)):
        of_steps = (np.exp(wanted) * (wanted - logs)).sum(-1)
        same = np.mean(wanted.argmax(-1) == logs.argmax(-1))
        lines.append(
            f"{name}: mean {of_steps.mean():.1e}, largest {of_steps.max():.1e}, {same:.0%} same token"
        )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--kv", default="q8_0")
    parser.add_argument("--depth", type=int, default=4096)


def run(given: argparse.Namespace) -> None:
    for path in given.models:
        lines = alone(divergences, path, given.backend, given.kv, given.depth)
        print(f"{Path(path).stem}\n  " + "\n  ".join(lines), flush=True)
