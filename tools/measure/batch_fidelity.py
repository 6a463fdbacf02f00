"""How far the logits of several rows are from those of each sequence alone, on an NVIDIA GPU:

    python -m tools.measure batch_fidelity MODEL... [--backend cuda] [--rows 1,4,8]

Every runner is given the same tokens, so that a difference does not grow with the text. Printed are the median and the
largest difference of the log-probability of the most probable token, and in how many steps another token is the most
probable one, with the largest lead that the first one had there (a lead below 1e-3 is a tie). The line "alone again" is
the control: the same runner, whose prompt came in smaller chunks. Experts are chosen by rank, so a rounding error may
choose another one, in the control too.
"""

import argparse
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.measure.engine_process import (
    Sequences,
    add_models,
    alone,
    log_probabilities,
    log_softmax,
    numbers,
    runners,
)

STEPS, PROMPT = 32, 200


def compared(path: str, backend: str, rows: list[int]) -> list[str]:
    """A line for the control and for each number of rows. To be called in a process of its own."""
    open_runner, vocab = runners(path, backend)
    draw, parallel, context = random.Random(0), max(2, *rows), PROMPT + STEPS
    texts = [[draw.randrange(min(1000, vocab)) for _ in range(context)] for _ in range(parallel)]
    one = open_runner(context)
    first = [log_probabilities(one, text, PROMPT) for text in texts]
    lines = [difference("alone again", first, [log_probabilities(one, text, PROMPT, 32) for text in texts])]
    del one
    runner = open_runner(context, parallel=parallel)
    for count in rows:
        sequences = Sequences(runner)
        for s in range(count):
            sequences.prefill(texts[s][:PROMPT], sequence=s)
        found: list[NDArray[np.float64]] = []
        for at in range(PROMPT, context):
            sequences.decode([text[at] for text in texts[:count]])
            found.append(log_softmax(runner.logits()))
        lines.append(difference(f"{count} rows", first[:count], list(np.stack(found, 1))))
    return lines


def difference(name: str, wanted: list[NDArray[np.float64]], found: list[NDArray[np.float64]]) -> str:
    """A line about log-probabilities (steps, vocab) of each sequence."""
    w, f = np.concatenate(wanted), np.concatenate(found)
    steps, best, other = np.arange(len(w)), w.argmax(1), f.argmax(1)
    apart = np.abs(w - f)[steps, best]
    leads = (w[steps, best] - w[steps, other])[best != other]
    others = f"{len(leads)} of {len(w)}" + (f", by at most {leads.max():.1e}" if len(leads) else "")
    return f"{name}: median {np.median(apart):.1e}, largest {apart.max():.1e}, other token in {others}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--rows", default="1,4,8", type=numbers)


def run(given: argparse.Namespace) -> None:
    for path in given.models:
        lines = alone(compared, path, given.backend, given.rows)
        print(f"{Path(path).stem}\n  " + "\n  ".join(lines), flush=True)
