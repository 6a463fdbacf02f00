"""Decode of several sequences at once on an NVIDIA GPU, beside decode of one:

    python -m tools.measure batch_rates MODEL... [--backend cuda] [--rows 1,2,8] [--depths 0,4096] [--wait] [--sampled]

Each row has a prompt of its own. Rates are medians of greedy steps, in tokens a second of all rows together. Each step
is launched before the tokens of the one before are read, except with `--wait` those of rows. With `--sampled`, tokens
are drawn on the device instead, at a temperature of 0.8 with a seed for each row. The first column is decode of one, of
a runner that has one sequence. Rows whose tokens are not those of their sequence alone are counted: half precision may
choose another of two tokens that are nearly as probable, or draw another where many are. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.measure.engine_process import Sequences, add_models, alone, numbers, runners

if TYPE_CHECKING:
    from engine.runtime.model_runner import ModelRunner

STEPS, PROMPT = 48, 40


def rates(
    path: str, backend: str, rows: list[int], depths: list[int], wait: bool, sampled: bool
) -> tuple[list[list[float]], list[int]]:
    """For each depth the rate of decode of one, and of so many rows; and for each row how many tokens it has in common
    with its sequence alone before they differ. To be called in a process of its own."""
    open_runner, _ = runners(path, backend)
    from msgspec.structs import replace

    from engine.protocol.events import Sampling
    from engine.runtime.model_runner import Drawing, same_rows
    from engine.runtime.sampling import Sampler

    draw, parallel, context = random.Random(0), max(2, *rows), max(depths) + PROMPT + 4 * STEPS
    prompts = [[draw.randrange(1000) for _ in range(max(depths) + PROMPT)] for _ in range(parallel)]
    settings = Sampling(temperature=0.8)
    uniforms = [Sampler(replace(settings, seed=s)).uniforms(STEPS) for s in range(parallel)]

    def decoded(runner: ModelRunner, prompts: list[list[int]], first: int) -> tuple[float, list[list[int]]]:
        """The median seconds of a step after prompts, and the text of each."""
        sequences, took, steps = Sequences(runner), [], []
        for s, prompt in enumerate(prompts):
            sequences.prefill(prompt[:-1], sequence=s)
            drawing = Drawing(settings, prompt, uniforms[first + s])
            assert not sampled or (runner.sampler and runner.sampler.prepare(s, drawing))
        tokens = [prompt[-1] for prompt in prompts]
        for i in range(STEPS):
            started = time.perf_counter()
            is_ahead = i < STEPS - 1 and not (wait and len(tokens) > 1)
            tokens = sequences.decode(tokens, same_rows if is_ahead else None, sampled)
            took.append(time.perf_counter() - started)
            steps.append(tokens)
        return statistics.median(took), [list(text) for text in zip(*steps, strict=True)]

    one, found = open_runner(context), []
    texts: dict[tuple[int, int], list[int]] = {}
    for depth in depths:
        took = []
        for s in range(parallel):
            seconds, [texts[depth, s]] = decoded(one, [prompts[s][: depth + PROMPT]], s)
            took.append(seconds)
        found.append([1 / statistics.median(took)])
    del one
    runner = open_runner(context, parallel=parallel)
    common: list[int] = []
    for depth, line in zip(depths, found, strict=True):
        for count in rows:
            seconds, own = decoded(runner, [prompt[: depth + PROMPT] for prompt in prompts[:count]], 0)
            line.append(count / seconds)
            for s, text in enumerate(own):
                pairs = enumerate(zip(text, texts[depth, s], strict=True))
                common.append(next((i for i, (a, b) in pairs if a != b), STEPS))
    return found, common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--rows", default="1,2,4,8,16", type=numbers)
    parser.add_argument("--depths", default="0,4096", type=numbers)
    parser.add_argument("--wait", action="store_true", help="no step of rows runs ahead")
    parser.add_argument("--sampled", action="store_true", help="draw tokens")


def run(given: argparse.Namespace) -> None:
    print("| | one alone | " + " | ".join(f"{n} rows" for n in given.rows) + " |")
    print("|---" * (2 + len(given.rows)) + "|", flush=True)
    for path in given.models:
        found, common = alone(rates, path, given.backend, given.rows, given.depths, given.wait, given.sampled)
        for depth, line in zip(given.depths, found, strict=True):
            cells = [f"{line[0]:,.0f}", *(f"{rate:,.0f} ({rate / line[0]:.2f}x)" for rate in line[1:])]
            print(f"| {Path(path).stem} at {depth} | {' | '.join(cells)} |")
        parted = [n for n in common if n < STEPS]
        after = f", on average after {statistics.mean(parted):.0f}" if parted else ""
        print(f"\n{len(parted)} of {len(common)} rows have other tokens than alone{after}.\n", flush=True)
