"""Decode of several sequences at once on an NVIDIA GPU, beside decode of one:

    python -m tests.batch_rates MODEL... [--backend cuda] [--rows 1,2,4,8,16] [--depths 0,4096] [--wait] [--sampled]

Each row has a prompt of its own. Rates are medians of greedy steps, in tokens a second of all rows together. Each step
is launched before the tokens of the one before are read, except with `--wait` those of rows. With `--sampled`, tokens
are drawn on the device instead, at a temperature of 0.8 with a seed for each row. The first column is decode of one, of
a runner that has one sequence. Rows whose tokens are not those of their sequence alone are counted: half precision may
choose another of two tokens that are nearly as probable, or draw another where many are. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

STEPS, PROMPT = 48, 40


def rates(
    path: str, backend: str, rows: list[int], depths: list[int], wait: bool, sampled: bool
) -> tuple[list[list[float]], list[int]]:
    """For each depth the rate of decode of one, and of so many rows; and for each row how many tokens it has in common
    with its sequence alone before they differ. To be called in a process of its own, which the engine sets up as it
    does its worker."""
    from msgspec.structs import replace

    from engine.backends import install, prepare
    from engine.events import EngineOptions, Sampling

    install(prepare(EngineOptions(model_path=path, backend=backend)))
    from engine.formats.gguf import GGUF
    from engine.model.architectures import read_spec
    from engine.model.fused import FusedBatchRunner
    from engine.model.kv_blocks import KVBlocks
    from engine.model.model_runner import Row, SamplingRunner
    from engine.model.open_runner import open_runner
    from engine.model.sampling import Sampler
    from engine.model.weights import Weights

    file, draw, parallel = GGUF(path), random.Random(0), max(2, *rows)
    spec, context = read_spec(file), max(depths) + PROMPT + 4 * STEPS
    alone = open_runner(Weights(file, spec, lambda _: None), context)
    prompts = [[draw.randrange(1000) for _ in range(max(depths) + PROMPT)] for _ in range(parallel)]
    settings = Sampling(temperature=0.8)
    numbers = [Sampler(replace(settings, seed=s)).uniforms(STEPS) for s in range(parallel)]
    found, texts = [], {}
    for depth in depths:
        took = []
        for s in range(parallel):
            decode, prompt = alone.decode, prompts[s][: depth + PROMPT]
            for at in range(0, len(prompt) - 1, alone.max_chunk):
                alone.prefill(prompt[at : len(prompt) - 1][: alone.max_chunk], at)
            token, text = prompt[-1], []
            if sampled:
                assert isinstance(alone, SamplingRunner)
                assert alone.prepare_sampling(settings, prompt, numbers[s])
                decode = alone.decode_and_sample
            for i in range(STEPS):
                started = time.perf_counter()
                token = decode(token, len(prompt) - 1 + i, run_ahead=i < STEPS - 1)
                took.append(time.perf_counter() - started)
                text.append(token)
            texts[depth, s] = text
        found.append([1 / statistics.median(took)])
    del alone
    runner = open_runner(Weights(file, spec, lambda _: None), context, parallel=parallel)
    common: list[int] = []
    assert isinstance(runner, FusedBatchRunner)
    for depth, line in zip(depths, found, strict=True):
        for count in rows:
            blocks, tokens, own = KVBlocks(runner), [p[depth + PROMPT - 1] for p in prompts], []
            for s in range(count):
                prompt = prompts[s][: depth + PROMPT - 1]
                for at in range(0, len(prompt), runner.max_chunk):
                    part = prompt[at : at + runner.max_chunk]
                    blocks.reserve(s, len(part))
                    runner.prefill(part, at, s)
                    blocks.commit(s, part)
                if sampled:
                    assert runner.prepare_row_sampling(s, settings, prompts[s][: depth + PROMPT], numbers[s])
            took = []
            for i in range(STEPS):
                started = time.perf_counter()
                for s in range(count):
                    blocks.reserve(s, 2)
                step = [Row(tokens[s], blocks.length(s), s, sampled) for s in range(count)]
                chosen = runner.decode_rows(step, ahead=i < STEPS - 1 and not wait)
                for s in range(count):
                    blocks.commit(s, tokens[s : s + 1])
                    tokens[s] = int(chosen[s])
                took.append(time.perf_counter() - started)
                own.append(list(tokens[:count]))
            line.append(count / statistics.median(took))
            for s in range(count):
                pairs = enumerate(zip((step[s] for step in own), texts[depth, s], strict=True))
                common.append(next((i for i, (one, other) in pairs if one != other), STEPS))
    return found, common


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser.add_argument("--rows", default="1,2,4,8,16", type=numbers)
    parser.add_argument("--depths", default="0,4096", type=numbers)
    parser.add_argument("--wait", action="store_true", help="no step of rows runs ahead")
    parser.add_argument("--sampled", action="store_true", help="draw tokens")
    given = parser.parse_args()
    print("| | one alone | " + " | ".join(f"{n} rows" for n in given.rows) + " |")
    print("|---" * (2 + len(given.rows)) + "|", flush=True)
    for path in given.models:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            found, common = own.submit(
                rates, path, given.backend, given.rows, given.depths, given.wait, given.sampled
            ).result()
        for depth, line in zip(given.depths, found, strict=True):
            cells = [f"{line[0]:,.0f}", *(f"{rate:,.0f} ({rate / line[0]:.2f}x)" for rate in line[1:])]
            print(f"| {Path(path).stem} at {depth} | {' | '.join(cells)} |")
        parted = [n for n in common if n < STEPS]
        after = f", on average after {statistics.mean(parted):.0f}" if parted else ""
        print(f"\n{len(parted)} of {len(common)} rows have other tokens than alone{after}.\n", flush=True)


if __name__ == "__main__":
    main()
