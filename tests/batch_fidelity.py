"""How far the logits of several rows are from those of each sequence alone, on an NVIDIA GPU:

    python -m tests.batch_fidelity MODEL... [--backend cuda] [--rows 1,4,8]

Every runner is given the same tokens, so that a difference does not grow with the text. Printed are the median and the
largest difference of the log-probability of the most probable token, and in how many steps another token is the most
probable one, with the largest lead that the first one had there (a lead below 1e-3 is a tie). The line "alone again" is
the control: the same runner, whose prompt came in smaller chunks. Experts are chosen by rank, so a rounding error may
choose another one, in the control too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

STEPS, PROMPT = 32, 200


def compared(path: str, backend: str, rows: list[int]) -> list[str]:
    """A line for the control and for each number of rows. To be called in a process of its own, which the engine sets
    up as it does its worker."""
    from engine.backends import install, prepare
    from engine.events import EngineOptions

    install(prepare(EngineOptions(model_path=path, backend=backend)))
    from engine.formats.gguf import GGUF
    from engine.model.architectures import read_spec
    from engine.model.kv_blocks import KVBlocks
    from engine.model.model_runner import BatchRunner, ModelRunner, Row
    from engine.model.open_runner import open_runner
    from engine.model.weights import Weights

    file, draw, parallel = GGUF(path), random.Random(0), max(2, *rows)
    spec, context = read_spec(file), PROMPT + STEPS
    texts = [[draw.randrange(min(1000, spec.vocab)) for _ in range(context)] for _ in range(parallel)]
    runner = open_runner(Weights(file, spec, lambda _: None), context)

    def alone(runner: ModelRunner, s: int, chunk: int) -> NDArray[np.float64]:
        for at in range(0, PROMPT, chunk):
            runner.prefill(texts[s][at : min(at + chunk, PROMPT)], at)
        steps = []
        for at in range(PROMPT, context):
            runner.decode(texts[s][at], at)
            steps.append(log_softmax(runner.logits()))
        return np.array(steps)

    first = [alone(runner, s, runner.max_chunk) for s in range(parallel)]
    lines = [difference("alone again", first, [alone(runner, s, 32) for s in range(parallel)])]
    del runner
    batch = open_runner(Weights(file, spec, lambda _: None), context, parallel=parallel)
    assert isinstance(batch, BatchRunner)
    for count in rows:
        blocks = KVBlocks(batch)
        for s in range(count):
            for at in range(0, PROMPT, batch.max_chunk):
                part = texts[s][at : min(at + batch.max_chunk, PROMPT)]
                blocks.reserve(s, len(part))
                batch.prefill(part, at, s)
                blocks.commit(s, part)
        found = []
        for at in range(PROMPT, context):
            for s in range(count):
                blocks.reserve(s, 1)
            batch.decode_rows([Row(texts[s][at], at, s) for s in range(count)])
            found.append([log_softmax(x) for x in batch.row_logits()])
            for s in range(count):
                blocks.commit(s, texts[s][at : at + 1])
        lines.append(
            difference(
                f"{count} rows", first[:count], [np.array([step[s] for step in found]) for s in range(count)]
            )
        )
    return lines


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities."""
    x = logits.astype(np.float64) - logits.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def difference(name: str, wanted: list[NDArray[np.float64]], found: list[NDArray[np.float64]]) -> str:
    """A line about log-probabilities (steps, vocab) of each sequence."""
    w, f = np.concatenate(wanted), np.concatenate(found)
    steps, best, other = np.arange(len(w)), w.argmax(1), f.argmax(1)
    apart = np.abs(w - f)[steps, best]
    leads = (w[steps, best] - w[steps, other])[best != other]
    others = f"{len(leads)} of {len(w)}" + (f", by at most {leads.max():.1e}" if len(leads) else "")
    return f"{name}: median {np.median(apart):.1e}, largest {apart.max():.1e}, other token in {others}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", default="1,4,8", type=lambda text: [int(n) for n in text.split(",")])
    given = parser.parse_args()
    for path in given.models:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            lines = own.submit(compared, path, given.backend, given.rows).result()
        print(f"{Path(path).stem}\n  " + "\n  ".join(lines), flush=True)


if __name__ == "__main__":
    main()
